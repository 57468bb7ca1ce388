// w4q doctor: what there is to compute with, and why something is off.
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>

#include "common_options.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "core/text.h"
#include "device/installation.h"
#include "device/properties.h"
#include "kernels/linear/gemm.h"
#include "machine.h"

namespace w4q::app {
namespace {

/// How the program was built (CMakeLists.txt).
struct Build {
  std::string version = W4Q_VERSION, compiler = W4Q_COMPILER, type = W4Q_BUILD_TYPE;
  std::vector<int> architectures;  ///< of kernels: 89 for an RTX 4090; none: without CUDA
  bool wgmma = W4Q_BUILT_WGMMA, fast_compiled = W4Q_BUILT_FAST;
};

Build find_build() {
  Build build;
  std::istringstream words(W4Q_BUILT_ARCHITECTURES);
  for (int sm = 0; words >> sm;) build.architectures.push_back(sm);
  return build;
}

/// What a diagnosis finds, for both ways of printing it.
struct Diagnosis {
  std::string text;
  io::Json json = io::Json::object();
  std::vector<std::string> notes;  ///< why something is off or slow, and what to do
};

std::string toolkit_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

std::string sm_text(const std::vector<int>& architectures) {
  std::vector<std::string> names;
  for (const int sm : architectures) names.push_back(concat("sm_", sm));
  return join(names);
}

void add_build(const Build& build, const device::Installation& installation, Diagnosis& found) {
  const bool cuda = installation.toolkit > 0;
  found.text += concat("w4q ", build.version, ", ", build.compiler, ", ", build.type, "\n");
  found.text += cuda ? concat("CUDA      built with toolkit ", toolkit_text(installation.toolkit), " for ",
                              sm_text(build.architectures), build.wgmma ? ", warpgroup products for sm_90a" : "", "\n")
                     : "CUDA      not built in\n";
  found.json["program"] = {{"version", build.version},
                           {"compiler", build.compiler},
                           {"build_type", build.type},
                           {"cuda", cuda ? io::Json(toolkit_text(installation.toolkit)) : io::Json()},
                           {"architectures", build.architectures},
                           {"warpgroup_products", build.wgmma},
                           {"fast_compiled_kernels", build.fast_compiled}};
  if (build.fast_compiled) {
    found.notes.emplace_back(
        "kernels were only looked at (W4Q_FAST_COMPILED_KERNELS), so that no GPU can run them: build with --preset "
        "release");
  }
  if (build.type == "Debug") found.notes.emplace_back("a Debug build is slow: build with --preset release");
}

/// Whether kernels run on a GPU: as they are, once the driver has compiled them, or not at all.
enum class Fit { machine_code, compiled_by_driver, none };

Fit fit_of(int sm, const Build& build) {
  Fit fit = Fit::none;
  if (build.fast_compiled) return fit;
  for (const int built : build.architectures) {
    if (built / 10 == sm / 10 && built <= sm) return Fit::machine_code;
    if (built < sm) fit = Fit::compiled_by_driver;
  }
  return fit;
}

void add_gpu(int ordinal, const device::Properties& gpu, const Build& build, Diagnosis& found) {
  const Fit fit = fit_of(gpu.sm, build);
  const char* const words = fit == Fit::machine_code ? "kernels run as they are"
                            : fit == Fit::compiled_by_driver
                                ? "the driver compiles the kernels when they are first used"
                                : "no kernel was built that it could run";
  found.text += concat("cuda:", ordinal, "    ", gpu.name, ", sm_", gpu.sm, ", ", gpu.multiprocessors,
                       " multiprocessors, ", human_bytes(gpu.memory_bytes), ": ", words, "\n");
  found.json["gpus"].push_back({{"ordinal", ordinal},
                                {"name", gpu.name},
                                {"sm", gpu.sm},
                                {"multiprocessors", gpu.multiprocessors},
                                {"memory_bytes", gpu.memory_bytes},
                                {"kernels", fit == Fit::machine_code         ? "machine code"
                                            : fit == Fit::compiled_by_driver ? "compiled by the driver"
                                                                             : "none"}});
  if (build.fast_compiled) return;  // which its note says
  if (fit != Fit::machine_code) {
    found.notes.push_back(concat("cuda:", ordinal, ": there is machine code for ", sm_text(build.architectures),
                                 " only: build with -DW4Q_CUDA_ARCHITECTURES=", gpu.sm));
  } else if (gpu.sm == 90 && !build.wgmma) {
    found.notes.push_back(concat("cuda:", ordinal,
                                 ": warpgroup products are not built in, without which prompts take longer: build with "
                                 "-DW4Q_CUDA_ARCHITECTURES=90"));
  }
}

void add_gpus(const Build& build, const device::Installation& installation, Diagnosis& found) {
  found.json["gpus"] = io::Json::array();
  found.json["driver"] = installation.driver > 0 ? io::Json(toolkit_text(installation.driver)) : io::Json();
  if (installation.driver > 0) {
    found.text += concat("driver    serves toolkits up to ", toolkit_text(installation.driver), "\n");
  }
  std::string why;
  int count = 0;
  while (const auto gpu = device::find_gpu(&why, count)) add_gpu(count++, *gpu, build, found);
  found.json["no_gpu"] = count > 0 ? io::Json() : io::Json(why);
  if (count == 0) {
    found.text += concat("GPU       none: ", why, "\n");
    found.notes.push_back(
        concat("no GPU to use: ", why, "; everything but bench, --speed and --kernels works on the CPU"));
  }
  found.json["libraries"] = io::Json::array();
  for (const auto& library : installation.libraries) {
    const bool here = library.why.empty();
    found.text += concat(here ? "found     " : "missing   ", library.name, ": ", library.for_what, "\n");
    found.json["libraries"].push_back({{"name", library.name},
                                       {"for", library.for_what},
                                       {"found", here},
                                       {"why", here ? io::Json() : io::Json(library.why)}});
    if (!here && count > 0) found.notes.push_back(concat(library.name, " cannot be opened: ", library.why));
  }
}

/// Environment variables that change how w4q runs.
constexpr const char* variables[] = {
    "OMP_NUM_THREADS",  "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "CUDA_FORCE_PTX_JIT", "TMPDIR",
    "DNNL_MAX_CPU_ISA", "NO_COLOR"};

void add_processor(Diagnosis& found) {
  const Processor processor = find_processor();
  const auto targets = simd_targets();
  const std::string products(kernels::gemm_library());
  found.text += concat("CPU       ", processor.model.empty() ? "unknown" : processor.model, "; ", targets.front(),
                       " of Highway; products by ", products, "\n");
  found.text += concat("threads   ", threads(), " of ", processor.online, " cores\n");
  found.json["cpu"] = {{"model", processor.model},
                       {"cores", processor.online},
                       {"allowed_cores", processor.allowed},
                       {"quota_cores", processor.quota > 0 ? io::Json(processor.quota) : io::Json()},
                       {"threads", threads()},
                       {"instructions", targets},
                       {"products", products}};
  if (products == "Eigen") {
    found.notes.emplace_back(
        "products on the CPU are Eigen's at the baseline instruction set, several times slower than oneDNN's: install "
        "libdnnl-dev and build again");
  }
  if (processor.quota > 0 && processor.quota < threads()) {
    found.notes.push_back(concat("the control group gets the time of ", fixed(processor.quota, 1), " cores: --threads ",
                                 std::max(1, static_cast<int>(processor.quota)), " fits that better than ", threads()));
  }
  if (processor.allowed < processor.online) {
    found.notes.push_back(concat("this process may use ", processor.allowed, " of ", processor.online, " cores"));
  }
}

void add_memory(Diagnosis& found) {
  const Memory memory = find_memory();
  found.text +=
      concat("memory    ", human_bytes(memory.available), " of ", human_bytes(memory.total), " available",
             memory.limit > 0 ? concat(", limit of the control group ", human_bytes(memory.limit)) : "", "\n");
  found.json["memory"] = {{"total_bytes", memory.total},
                          {"available_bytes", memory.available},
                          {"limit_bytes", memory.limit > 0 ? io::Json(memory.limit) : io::Json()}};
}

void add_place(const char* what, const std::filesystem::path& path, const char* remedy, Diagnosis& found) {
  const Place place = look_at(path);
  found.text += concat("disk      ", human_bytes(place.free_bytes), " free in ", printable(place.path.native()), " (",
                       what, ")", place.in_memory ? ", in memory" : "", place.writable ? "" : ", not writable", "\n");
  found.json["folders"].push_back({{"what", what},
                                   {"path", place.path.native()},
                                   {"free_bytes", place.free_bytes},
                                   {"writable", place.writable},
                                   {"in_memory", place.in_memory}});
  if (!place.writable) found.notes.push_back(concat(printable(path.native()), " cannot be written to: ", remedy));
  if (place.in_memory) found.notes.push_back(concat(printable(path.native()), " lies in memory: ", remedy));
}

void add_environment(Diagnosis& found) {
  found.json["environment"] = io::Json::object();
  for (const char* name : variables) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    found.text += concat("variable  ", name, "=", printable(value), "\n");
    found.json["environment"][name] = value;
  }
}

int run(const CommonOptions& options) {
  apply(options);
  Diagnosis found;
  const Build build = find_build();
  const auto installation = device::find_installation();
  add_build(build, installation, found);
  add_gpus(build, installation, found);
  add_processor(found);
  add_memory(found);
  std::error_code none;
  auto temporary = std::filesystem::temp_directory_path(none);
  if (none) temporary = "/tmp";
  add_place("GGUF files that verify reads are unpacked here", temporary, "TMPDIR=FOLDER names another one", found);
  add_place("the current folder; what is too large for --max-memory goes beside the output",
            std::filesystem::current_path(none), "write outputs elsewhere", found);
  add_environment(found);
  found.json["notes"] = found.notes;
  for (const auto& note : found.notes) found.text += "note: " + note + "\n";
  if (found.notes.empty()) found.text += "nothing is off\n";
  print(options, schema::doctor, found.text, found.json);
  return 0;
}

}  // namespace

void setup_doctor(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("doctor", "Say what there is to compute with, and why something is off");
  auto options = std::make_shared<CommonOptions>();
  add_common(*command, *options);
  set_examples(*command, {{"doctor", "GPU, driver, libraries, what is compiled in, processor, memory, disk"},
                          {"doctor --json", "the same for a bug report"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
