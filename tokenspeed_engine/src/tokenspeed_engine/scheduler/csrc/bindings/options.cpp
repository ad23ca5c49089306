// RequestOptions in Python: a frozen value.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "../plan/options.h"
#include "bindings.h"
#include "scheduler_docs.h"  // made from _scheduler.pyi

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed {

namespace {
constexpr std::size_t kMaxSaltBytes = 256;

// What differs from the default.
std::string describe(const RequestOptions& o) {
  const RequestOptions none;
  std::string text;
  const auto add = [&](const std::string& part, bool differs) {
    if (differs) text += (text.empty() ? "" : ", ") + part;
  };
  add("session=" + std::to_string(o.session), o.session != none.session);
  add("salt=...", o.salt != none.salt);  // it may be its tenant's secret
  add("priority=" + std::to_string(o.priority), o.priority != none.priority);
  add("tenant=" + std::to_string(o.tenant), o.tenant != none.tenant);
  add("tenant_weight=" + std::to_string(o.tenant_weight), o.tenant_weight != none.tenant_weight);
  add("deadline_us=" + std::to_string(o.deadline_us), o.deadline_us != none.deadline_us);
  add(o.role == Role::kPrefill ? "role=Role.PREFILL" : "role=Role.DECODE", o.role != none.role);
  return "RequestOptions(" + text + ")";
}
}  // namespace

void bind_options(nb::module_& m) {
  nb::enum_<Role>(m, "Role", doc::Role)
      .value("LOCAL", Role::kLocal)
      .value("PREFILL", Role::kPrefill)
      .value("DECODE", Role::kDecode);

  nb::class_<RequestOptions>(m, "RequestOptions", doc::RequestOptions)
      .def(
          "__init__",
          [](RequestOptions* self, std::int64_t session, std::string salt, std::int32_t priority, std::int64_t tenant,
             std::int32_t tenant_weight, std::int64_t deadline_us, Role role) {
            const auto check = [](const char* name, std::int64_t value, std::int64_t least) {
              if (value >= least) return;
              throw nb::value_error(("RequestOptions." + std::string(name) + ": expected at least " + std::to_string(least) +
                                     ", got " + std::to_string(value)).c_str());
            };
            check("session", session, 0);
            check("tenant", tenant, 0);
            check("tenant_weight", tenant_weight, 1);
            check("deadline_us", deadline_us, -1);
            if (salt.size() > kMaxSaltBytes) {
              throw nb::value_error(("RequestOptions.salt: expected at most " + std::to_string(kMaxSaltBytes) + " bytes of UTF-8, got " +
                                     std::to_string(salt.size())).c_str());
            }
            new (self) RequestOptions{session, std::move(salt), priority, tenant, tenant_weight, deadline_us, role};
          },
          nb::kw_only(), "session"_a = 0, "salt"_a = "", "priority"_a = 0, "tenant"_a = 0, "tenant_weight"_a = 1, "deadline_us"_a = -1, "role"_a = Role::kLocal,
          doc::RequestOptions_init)
      .def_ro("session", &RequestOptions::session, doc::RequestOptions_session)
      .def_ro("salt", &RequestOptions::salt, doc::RequestOptions_salt)
      .def_ro("priority", &RequestOptions::priority, doc::RequestOptions_priority)
      .def_ro("tenant", &RequestOptions::tenant, doc::RequestOptions_tenant)
      .def_ro("tenant_weight", &RequestOptions::tenant_weight, doc::RequestOptions_tenant_weight)
      .def_ro("deadline_us", &RequestOptions::deadline_us, doc::RequestOptions_deadline_us)
      .def_ro("role", &RequestOptions::role, doc::RequestOptions_role)
      .def("__repr__", [](const RequestOptions& self) { return describe(self); });
}

}  // namespace tokenspeed
