// Every other test that reads JSON of the program holds it against its schema on the way (program.h); here is what no other
// test asks for, and what must hold of the schemas themselves.
#include "json_schema.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>

#include "core/text.h"
#include "program.h"

namespace w4q::test {
namespace {

using ::testing::IsEmpty;

/// Every object that a schema describes, with the place where it stands.
void each_object(const io::Json& schema, const std::string& at,
                 const std::function<void(const io::Json&, const std::string&)>& visit) {
  if (schema.contains("properties")) visit(schema, at);
  for (const char* inside : {"items", "additionalProperties"}) {
    if (schema.contains(inside) && schema[inside].is_object())
      each_object(schema[inside], concat(at, "/", inside), visit);
  }
  if (!schema.contains("properties")) return;
  for (const auto& [name, property] : schema["properties"].items()) each_object(property, concat(at, "/", name), visit);
}

TEST(Schema, EveryOneIsClosedAndSaysWhatItsKeysAre) {
  const auto names = schema_names();
  EXPECT_GE(names.size(), 20u);
  for (const auto& name : names) {
    const auto schema = read_schema(name);
    EXPECT_EQ(schema["properties"]["schema"]["const"], name);
    EXPECT_TRUE(schema["properties"]["version"]["const"].is_number_integer()) << name;
    for (const auto& [key, property] : schema["properties"].items()) {
      EXPECT_TRUE(property.contains("description")) << name << ": " << key;
    }
    each_object(schema, name, [](const io::Json& object, const std::string& at) {
      EXPECT_TRUE(object.contains("additionalProperties")) << at << " lets anything through";
      for (const auto& key : object.value("required", io::Json::array())) {
        EXPECT_TRUE(object["properties"].contains(key)) << at << ": " << key;
      }
    });
  }
}

TEST(Schema, FindsWhatItDoesNotSay) {
  const io::Json sound = {{"schema", "clean"}, {"version", 1}, {"leftovers", io::Json::array()},
                          {"dry_run", false},  {"removed", 0}, {"bytes", 0}};
  EXPECT_THAT(schema_faults(sound), IsEmpty());
  io::Json other = sound;
  other["added"] = 1;
  EXPECT_EQ(schema_faults(other), std::vector<std::string>{"clean: has \"added\", which the schema lacks"});
  other = sound;
  other.erase("bytes");
  EXPECT_EQ(schema_faults(other), std::vector<std::string>{"clean: lacks \"bytes\""});
  other = sound;
  other["removed"] = "0";
  EXPECT_EQ(schema_faults(other), std::vector<std::string>{"clean/removed: is \"0\", not of type \"integer\""});
  other = sound;
  other["version"] = 2;
  EXPECT_EQ(schema_faults(other), std::vector<std::string>{"clean/version: is 2, not 1"});
  EXPECT_EQ(schema_faults(io::Json::object()).size(), 1u);
}

TEST(Schema, SpeedsMeasuredBeforeFitTheSchemaOfBench) {
  for (const auto& entry : std::filesystem::directory_iterator(W4Q_BENCH_RESULTS)) {
    if (entry.path().filename().string().find("-decode-") == std::string::npos) continue;
    io::Json json = io::read_json(entry.path());
    json["schema"] = "bench";
    json["version"] = 1;
    EXPECT_THAT(schema_faults(json), IsEmpty()) << entry.path();
  }
}

/// Outputs that no other test of the command line reads.
class Outputs : public OnBundledModel {};

TEST_F(Outputs, OfCommandsThatLookAtWhatIsThere) {
  ASSERT_EQ(quantize("packed", {"--k", "3"}).status, 0);
  const auto packed = path("packed"), model = bundled_model();
  for (const auto& words :
       std::vector<std::vector<std::string>>{{"doctor"},
                                             {"list"},
                                             {"list", "--dialects"},
                                             {"clean", packed},
                                             {"inspect", model, "--tensor", "model.norm.weight"},
                                             {"inspect", packed, "--tensor", "model.layers.0.mlp.up_proj"},
                                             {"hash", packed, "--check"},
                                             {"repack", packed, "--target", "sm89", "--dry-run"},
                                             {"generate", packed, "--prompt", "Once", "--max-tokens", "2"}}) {
    auto arguments = words;
    arguments.emplace_back("--json");
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_FALSE(result.json().empty());
  }
}

TEST_F(Outputs, OfADoctorTellWhatThisProgramIs) {
  const auto json = run_w4q({"doctor", "--json", "--threads", "2"}).json();
  EXPECT_EQ(json["cpu"]["threads"], 2);
  EXPECT_FALSE(json["cpu"]["instructions"].empty());
  EXPECT_EQ(json["gpus"].empty(), json["no_gpu"].is_string());
  EXPECT_EQ(json["program"]["cuda"].is_null(), json["program"]["architectures"].empty());
  EXPECT_GT(json["memory"]["total_bytes"], json["memory"]["available_bytes"]);
  const auto elsewhere = run_w4q({"doctor", "--json"}, [] { ::setenv("TMPDIR", "/nowhere", 1); }).json();
  EXPECT_TRUE(std::ranges::any_of(elsewhere["folders"], [](const auto& folder) { return folder["free_bytes"] > 0; }));
  const auto text = run_w4q({"doctor"});
  EXPECT_EQ(text.status, 0);
  for (const auto& note : json["notes"]) EXPECT_NE(text.out.find(note.get<std::string>()), std::string::npos) << note;
}

}  // namespace
}  // namespace w4q::test
