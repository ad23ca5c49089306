// Parts of the module that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

void bind_options(nanobind::module_& m);

}  // namespace tokenspeed
