#include "program.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <sstream>

#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output.h"
#include "io/safetensors.h"
#include "json_schema.h"

namespace w4q::test {
namespace {

/// The program under test; the variable names another build of it.
std::string program() {
  const char* variable = std::getenv("W4Q_PROGRAM");
  return variable != nullptr ? variable : W4Q_PROGRAM;
}

[[noreturn]] void execute(std::vector<std::string> words) {
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(pointers.front(), pointers.data());
  std::_Exit(127);
}

/// The words of the launcher, if there is one, and of the program.
std::vector<std::string> command(std::vector<std::string> launcher, const std::vector<std::string>& arguments) {
  launcher.push_back(program());
  launcher.insert(launcher.end(), arguments.begin(), arguments.end());
  return launcher;
}

/// Reads both pipes until both are closed.
void drain(int out, int err, ProgramResult& result) {
  std::array<pollfd, 2> fds{{{out, POLLIN, 0}, {err, POLLIN, 0}}};
  std::array<char, 65536> buffer{};
  for (int open = 2; open > 0;) {
    ::poll(fds.data(), fds.size(), -1);
    for (auto& entry : fds) {
      if (entry.fd < 0 || entry.revents == 0) continue;
      const ssize_t count = ::read(entry.fd, buffer.data(), buffer.size());
      if (count > 0) {
        (entry.fd == out ? result.out : result.err).append(buffer.data(), static_cast<size_t>(count));
      } else {
        ::close(entry.fd);
        entry.fd = -1;
        --open;
      }
    }
  }
}

std::string slurp(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Starts it with its output in two pipes. Without anything to prepare the pages of this process, which may be many, are
/// not copied for it.
pid_t start_between(std::vector<std::string> words, int out, int err, const std::function<void()>& prepare) {
  if (!prepare) {
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
    pid_t child = 0;
    const int failure = ::posix_spawnp(&child, pointers.front(), &actions, nullptr, pointers.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (failure != 0) throw std::runtime_error(words.front() + " cannot be started");
    return child;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
    ::close(out);
    ::close(err);
    prepare();
    execute(words);
  }
  return child;
}

ProgramResult run_words(const std::vector<std::string>& words, const std::function<void()>& prepare) {
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  // Closed in programs that other threads start meanwhile, which would keep them open.
  if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = start_between(words, out[1], err[1], prepare);
  ::close(out[1]);
  ::close(err[1]);
  ProgramResult result;
  drain(out[0], err[0], result);
  int status = 0;
  rusage usage{};
  ::wait4(child, &status, 0, &usage);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  result.peak_bytes = int64_t{usage.ru_maxrss} * 1024;
  return result;
}

pid_t start_words(const std::vector<std::string>& words) {
  const pid_t child = ::fork();
  if (child == 0) {
    const int nothing = ::open("/dev/null", O_RDWR);
    ::dup2(nothing, STDOUT_FILENO);
    ::dup2(nothing, STDERR_FILENO);
    execute(words);
  }
  return child;
}

}  // namespace

io::Json ProgramResult::json() const {
  auto json = io::parse_json(out, "stdout");
  for (const auto& fault : schema_faults(json)) ADD_FAILURE() << "docs/schema/" << fault;
  return json;
}

ProgramResult run_w4q(const std::vector<std::string>& arguments, const std::function<void()>& prepare) {
  return run_words(command({}, arguments), prepare);
}

ProgramResult run_w4q_behind(std::vector<std::string> launcher, const std::vector<std::string>& arguments) {
  return run_words(command(std::move(launcher), arguments), {});
}

pid_t start_w4q(const std::vector<std::string>& arguments) { return start_words(command({}, arguments)); }

pid_t start_w4q_behind(std::vector<std::string> launcher, const std::vector<std::string>& arguments) {
  return start_words(command(std::move(launcher), arguments));
}

namespace {

/// The layer that a tensor of the bundled model belongs to, -1 for those of none.
int layer_of(const std::string& name) {
  constexpr std::string_view prefix = "model.layers.";
  return name.starts_with(prefix) ? std::stoi(name.substr(prefix.size())) : -1;
}

std::string write_first_layers(const std::filesystem::path& to, int layers) {
  std::filesystem::copy(bundled_model(), to);  // files alone
  std::filesystem::remove(to / "model.safetensors");
  const auto model = io::Checkpoint::open(bundled_model());
  std::vector<io::PlannedTensor> plan;
  for (const auto& [name, info] : model.tensors()) {
    if (layer_of(name) < layers) plan.push_back({name, info.dtype, info.shape});
  }
  io::CheckpointWriter writer(to, plan, {});
  for (const auto& tensor : plan) writer.write(tensor.name, model.load(tensor.name)->bytes);
  writer.finish();
  io::Json config = io::read_json(to / "config.json");
  config["num_hidden_layers"] = layers;
  io::write_file(to / "config.json", config.dump(2), true);
  return to.string();
}

}  // namespace

const std::string& one_layer_model() {
  static const TemporaryFolder folder;
  static const std::string made = write_first_layers(folder / "m", 1);
  return made;
}

const std::string& two_layer_model() {
  static const TemporaryFolder folder;
  static const std::string made = write_first_layers(folder / "m", 2);
  return made;
}

std::string copy_bundled_model(const std::filesystem::path& folder) {
  std::filesystem::copy(bundled_model(), folder, std::filesystem::copy_options::recursive);
  return folder.string();
}

int64_t write_sparse_model(const std::filesystem::path& folder, int layers, int64_t hidden, int64_t intermediate,
                           int64_t vocabulary, bool fp8) {
  std::filesystem::create_directories(folder);
  io::Json config = {{"architectures", {"LlamaForCausalLM"}},
                     {"model_type", "llama"},
                     {"hidden_size", hidden},
                     {"intermediate_size", intermediate},
                     {"num_hidden_layers", layers},
                     {"num_attention_heads", hidden / 128},
                     {"num_key_value_heads", hidden / 512},
                     {"vocab_size", vocabulary},
                     {"rms_norm_eps", 1e-5},
                     {"rope_theta", 5e5},
                     {"max_position_embeddings", 2048},
                     {"tie_word_embeddings", true},
                     {"torch_dtype", "bfloat16"}};
  if (fp8) config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  std::ofstream(folder / "config.json") << config.dump();
  std::vector<io::PlannedTensor> plan{{"model.embed_tokens.weight", DType::bf16, {vocabulary, hidden}},
                                      {"model.norm.weight", DType::bf16, {hidden}}};
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, const Shape& shape) {
      const bool small = fp8 && shape.size() == 2;
      plan.push_back({prefix + name + ".weight", small ? DType::f8_e4m3 : DType::bf16, shape});
      if (!small) return;
      plan.push_back(
          {prefix + name + ".weight_scale_inv", DType::bf16, {(shape[0] + 127) / 128, (shape[1] + 127) / 128}});
    };
    add("input_layernorm", {hidden});
    add("post_attention_layernorm", {hidden});
    add("self_attn.q_proj", {hidden, hidden});
    add("self_attn.k_proj", {hidden / 4, hidden});
    add("self_attn.v_proj", {hidden / 4, hidden});
    add("self_attn.o_proj", {hidden, hidden});
    add("mlp.gate_proj", {intermediate, hidden});
    add("mlp.up_proj", {intermediate, hidden});
    add("mlp.down_proj", {hidden, intermediate});
  }
  const auto header = io::layout_safetensors(plan, {{"format", "pt"}});
  const std::string text = io::serialize_safetensors_header(header);
  const auto file = folder / "model.safetensors";
  std::ofstream(file, std::ios::binary) << text;
  const auto size = static_cast<int64_t>(text.size() + header.tensors.back().end);
  std::filesystem::resize_file(file, static_cast<uintmax_t>(size));
  return size;
}

std::string folder_digest(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string digest;
  for (const auto& file : files) {
    digest += std::filesystem::relative(file, folder).string() + ":" +
              std::to_string(std::hash<std::string>{}(slurp(file))) + "\n";
  }
  return digest;
}

}  // namespace w4q::test
