// RequestOptions in Python: a frozen value.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "../plan/options.h"
#include "bindings.h"
#include "scheduler_docs.h"  // made from _scheduler.pyi

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed {

namespace {
// What differs from the default.
std::string describe(const RequestOptions& o) {
  const RequestOptions none;
  std::string text;
  const auto add = [&](const char* name, const auto& value, const auto& usual) {
    if (value != usual) text += (text.empty() ? "" : ", ") + std::string(name) + "=" + std::to_string(value);
  };
  add("session", o.session, none.session);
  add("salt", o.salt, none.salt);
  add("priority", o.priority, none.priority);
  add("tenant", o.tenant, none.tenant);
  add("tenant_weight", o.tenant_weight, none.tenant_weight);
  add("deadline_us", o.deadline_us, none.deadline_us);
  return "RequestOptions(" + text + ")";
}
}  // namespace

void bind_options(nb::module_& m) {
  nb::class_<RequestOptions>(m, "RequestOptions", doc::RequestOptions)
      .def(
          "__init__",
          [](RequestOptions* self, std::int64_t session, std::uint64_t salt, std::int32_t priority, std::int64_t tenant,
             std::int32_t tenant_weight, std::int64_t deadline_us) {
            const auto check = [](const char* name, std::int64_t value, std::int64_t least) {
              if (value >= least) return;
              throw nb::value_error(("RequestOptions." + std::string(name) + ": expected at least " + std::to_string(least) +
                                     ", got " + std::to_string(value)).c_str());
            };
            check("session", session, 0);
            check("tenant", tenant, 0);
            check("tenant_weight", tenant_weight, 1);
            check("deadline_us", deadline_us, -1);
            new (self) RequestOptions{session, salt, priority, tenant, tenant_weight, deadline_us};
          },
          nb::kw_only(), "session"_a = 0, "salt"_a = 0, "priority"_a = 0, "tenant"_a = 0, "tenant_weight"_a = 1, "deadline_us"_a = -1,
          doc::RequestOptions_init)
      .def_ro("session", &RequestOptions::session, doc::RequestOptions_session)
      .def_ro("salt", &RequestOptions::salt, doc::RequestOptions_salt)
      .def_ro("priority", &RequestOptions::priority, doc::RequestOptions_priority)
      .def_ro("tenant", &RequestOptions::tenant, doc::RequestOptions_tenant)
      .def_ro("tenant_weight", &RequestOptions::tenant_weight, doc::RequestOptions_tenant_weight)
      .def_ro("deadline_us", &RequestOptions::deadline_us, doc::RequestOptions_deadline_us)
      .def("__repr__", [](const RequestOptions& self) { return describe(self); });
}

}  // namespace tokenspeed
