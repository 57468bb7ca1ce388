// Holds JSON against docs/schema: what w4q prints must be what those files say.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::test {

/// What of `json` its schema does not say, one line each: the schema that it names itself under "schema". Knows the part of
/// JSON Schema that docs/schema uses; anything else in there is a fault too.
std::vector<std::string> schema_faults(const io::Json& json);

/// The names of all schemas.
std::vector<std::string> schema_names();
io::Json read_schema(const std::string& name);

}  // namespace w4q::test
