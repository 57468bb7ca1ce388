#include "checkpoint/digests.h"

#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "io/output.h"
#include "io/system.h"

namespace w4q::checkpoint {
namespace {

namespace fs = std::filesystem;
using io::Json;

constexpr std::string_view format_name = "w4q digests";
constexpr int format_version = 1;
constexpr std::string_view hash_name = "XXH3-128 in pieces of 1 MiB";
constexpr int64_t max_file_bytes = 256 << 20;
constexpr size_t longest_value = 64;  // of a config, in a message

/// Other files that say what the numbers mean. Those of a dialect hold its quantization_config, and TurboQuant's
/// checkpoints keep what they do not pack in the last one.
constexpr auto meaningful_files = std::to_array<std::string_view>(
    {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
     "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
     "preprocessor_config.json", turboquant_config_file, "non_quantized.safetensors"});

/// Weight files of which nothing is read, beside those of which something is: other programs load all that they find.
std::vector<std::string> unread_weight_files(const fs::path& folder, const io::Checkpoint& tensors) {
  std::set<std::string, std::less<>> read, folders;
  for (const auto& [name, tensor] : tensors.tensors()) {
    const fs::path file = fs::path(tensors.file_of(name));
    const bool residual = file.parent_path().filename() == io::sidecar_folder;
    folders.insert(residual ? std::string(io::sidecar_folder) : std::string());
    read.insert(residual ? fs::path(io::sidecar_folder) / file.filename() : file.filename());
  }
  std::vector<std::string> names;
  for (const fs::path sub : folders) {
    std::error_code unreadable;
    for (const auto& entry : fs::directory_iterator(folder / sub, unreadable)) {
      const fs::path name = sub / entry.path().filename();
      const bool weights = io::is_weight_file(name.filename().native()) && name.extension() != ".json";
      if (weights && !read.contains(name.native())) names.push_back(name);
    }
  }
  return names;
}

std::map<std::string, io::Digest, std::less<>> digests_of_files(const fs::path& folder, const io::Checkpoint& tensors) {
  std::vector<std::string> names(meaningful_files.begin(), meaningful_files.end());
  names.insert(names.end(), std::begin(side_config_files), std::end(side_config_files));
  for (auto& name : unread_weight_files(folder, tensors)) names.push_back(std::move(name));
  std::map<std::string, io::Digest, std::less<>> result;
  for (const auto& name : names) {
    std::error_code unreadable;
    if (fs::is_regular_file(folder / name, unreadable)) result.emplace(name, io::digest_of_file(folder / name));
  }
  return result;
}

std::set<std::string, std::less<>> residual_of(const io::TensorDigests& tensors, const io::Checkpoint& files) {
  std::set<std::string, std::less<>> result;
  for (const auto& [name, tensor] : tensors) {
    if (fs::path(files.file_of(name)).parent_path().filename() == io::sidecar_folder) result.insert(name);
  }
  return result;
}

/// Keys sorted, no white space.
std::string canonical(const Json& json) { return nlohmann::json(json).dump(); }

// ---- the file -------------------------------------------------------------------------------------------------------

Json to_json(const io::TensorDigests& tensors) {
  nlohmann::json json = nlohmann::json::object();  // an ordered one would search all earlier names for each
  for (const auto& [name, tensor] : tensors) json[name] = tensor.text();
  return json;
}

/// Reads members of the file and says which one is wrong.
class Reader {
 public:
  explicit Reader(const fs::path& path) : path_(path) {
    std::error_code unreadable;
    if (!fs::is_regular_file(path, unreadable)) throw bad("is no file");
    json_ = io::parse_json(io::read_file(path, max_file_bytes), path.native());
    if (!json_.is_object() || json_.value("format", Json()) != format_name) {
      throw bad("is none of w4q's").detail(concat("expected an object whose \"format\" is \"", format_name, "\""));
    }
    const Json version = json_.value("format_version", Json());
    if (version == format_version) return;
    throw Error(ErrorCode::unsupported, concat(io::shown(path_), ": format_version ", io::shown(version.dump())))
        .detail(concat("this program reads version ", format_version))
        .hint("a newer w4q reads it; w4q hash --write --overwrite makes another");
  }

  Digests read() const {
    Digests result;
    result.tensors = tensors(json_, "tensors");
    if (json_.contains("residual")) {
      auto residual = tensors(json_, "residual");
      for (const auto& [name, tensor] : residual) result.residual.insert(name);
      result.tensors.merge(residual);
      if (!residual.empty()) throw bad(concat("lists ", io::shown(residual.begin()->first), " twice"));
    }
    for (const auto& [name, text] : object(json_, "files").items()) {
      const auto digest = text.is_string() ? io::parse_digest(text.get_ref<const std::string&>()) : std::nullopt;
      if (!digest) throw bad(concat("files: ", io::shown(name), " has no digest of 32 hex digits"));
      result.files.emplace(name, *digest);
    }
    result.config = json_.value("config", Json());
    const Json bases = json_.value("bases", Json::array());
    if (!bases.is_array()) throw bad("bases is no list");
    for (const Json& base : bases) result.bases.push_back(tensors(base, "tensors"));
    return result;
  }

 private:
  Error bad(const std::string& what) const {
    return Error(ErrorCode::bad_file, concat(io::shown(path_), ": ", what))
        .hint("w4q hash --write --overwrite makes another, of what is there now");
  }

  const Json& object(const Json& json, std::string_view key) const {
    if (!json.is_object()) throw bad("is malformed: an object is expected");
    const auto found = json.find(key);
    if (found == json.end() || !found->is_object()) throw bad(concat("has no object \"", key, "\""));
    return *found;
  }

  io::TensorDigests tensors(const Json& json, std::string_view key) const {
    io::TensorDigests result;
    for (const auto& [name, text] : object(json, key).items()) {
      const auto tensor = text.is_string() ? io::parse_tensor_digest(text.get_ref<const std::string&>()) : std::nullopt;
      if (!tensor) {
        throw bad(concat(key, ": ", io::shown(name), " has no digest"))
            .detail("expected type, shape and 32 hex digits: \"BF16 [64, 64] 0123…\"");
      }
      result.emplace(name, *tensor);
    }
    return result;
  }

  fs::path path_;
  Json json_;
};

// ---- what differs ---------------------------------------------------------------------------------------------------

std::string value_text(const nlohmann::json& json) {
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return printable(text.size() <= longest_value ? text : text.substr(0, longest_value) + "…");
}

/// Differing values by their path: "quantization_config.linears.lm_head.n". Keys are sorted.
void compare_config(const std::string& path, const nlohmann::json& written, const nlohmann::json& found,
                    std::vector<std::string>& faults) {
  if (written == found) return;
  if (!written.is_object() || !found.is_object()) {
    faults.push_back(concat(path, " is ", value_text(found), ", written was ", value_text(written)));
    return;
  }
  const auto below = [&](const std::string& key) {
    return concat(path, path.ends_with(": ") ? "" : ".", printable(key));
  };
  for (const auto& [key, value] : written.items()) {
    const auto other = found.find(key);
    if (other == found.end()) {
      faults.push_back(concat(below(key), " is missing, written was ", value_text(value)));
    } else {
      compare_config(below(key), value, *other, faults);
    }
  }
  for (const auto& [key, value] : found.items()) {
    if (!written.contains(key))
      faults.push_back(concat(below(key), " is ", value_text(value), ", written was nothing"));
  }
}

void compare_files(const Digests& written, const Digests& found, std::vector<std::string>& faults) {
  for (const auto& [name, digest] : written.files) {
    const auto other = found.files.find(name);
    if (other == found.files.end()) {
      faults.push_back(concat(printable(name), " is missing"));
    } else if (other->second != digest) {
      faults.push_back(concat(printable(name), " is not the file that was written: expected ", digest.text(), ", got ",
                              other->second.text()));
    }
  }
  for (const auto& [name, digest] : found.files) {
    if (!written.files.contains(name)) faults.push_back(concat(printable(name), " is extra: it was not there"));
  }
}

/// Names by what they stand for.
using Owners = std::map<io::Digest, std::string_view>;

Owners owners_of(const io::TensorDigests& tensors) {
  Owners result;
  for (const auto& [name, tensor] : tensors) result.emplace(tensor.digest, name);
  return result;
}

std::string wrong_tensor(const io::TensorDigest& expected, const io::TensorDigest& found, const Owners& owners) {
  if (const auto owner = owners.find(found.digest); owner != owners.end()) {
    return concat("holds what was written as ", printable(owner->second));
  }
  if (expected.type != found.type || expected.shape != found.shape) {
    return concat("is ", printable(found.type), " ", shape_text(found.shape), ", written was ",
                  printable(expected.type), " ", shape_text(expected.shape));
  }
  return concat("does not hold the bytes that were written: expected ", expected.digest.text(), ", got ",
                found.digest.text());
}

void compare_tensors(const Digests& written, const Digests& found, std::vector<std::string>& faults) {
  const Owners owners = owners_of(written.tensors);
  const auto is_found = [&](const std::string& name) { return found.tensors.contains(name); };
  const bool without_residual = std::ranges::none_of(written.residual, is_found);
  for (const auto& [name, tensor] : written.tensors) {
    const auto other = found.tensors.find(name);
    if (other == found.tensors.end()) {
      if (!without_residual || !written.residual.contains(name))
        faults.push_back(concat(printable(name), " is missing"));
    } else if (other->second != tensor) {
      faults.push_back(concat(printable(name), " ", wrong_tensor(tensor, other->second, owners)));
    }
  }
  for (const auto& [name, tensor] : found.tensors) {
    if (written.tensors.contains(name)) continue;
    const auto owner = owners.find(tensor.digest);
    const bool copied = owner != owners.end();
    faults.push_back(
        concat(printable(name), " is extra: ",
               copied ? concat("it holds what was written as ", printable(owner->second)) : "it was not written"));
  }
}

/// A value of GGUF's metadata in JSON; of arrays and long texts the digest.
Json digest_value(const io::GgufValue& value) {
  std::string bytes;
  const auto add = [&]<class T>(const T& one) {
    if constexpr (std::is_same_v<T, std::string>) {
      bytes += concat(one.size(), " ", one);
    } else {
      bytes.append(reinterpret_cast<const char*>(&one), sizeof one);
    }
  };
  const auto list = [&]<class T>(const T& values) {
    if constexpr (!std::is_same_v<T, std::monostate>) {
      for (const typename T::value_type& one : values) add(one);
    }
  };
  if (const auto* array = std::get_if<io::GgufArray>(&value)) {
    std::visit(list, *array);
  } else {
    std::visit(
        [&]<class T>(const T& one) {
          if constexpr (!std::is_same_v<T, io::GgufArray>) add(one);
        },
        value);
  }
  return concat(io::type_text(value), " ", io::digest_of(std::string_view(bytes)).text());
}

}  // namespace

fs::path digests_path(const fs::path& checkpoint) {
  if (fs::is_directory(checkpoint)) return checkpoint / digests_file;
  return concat(checkpoint.native(), ".", digests_file);
}

io::Digest fingerprint(const io::TensorDigests& tensors, const Json& config) {
  std::string all;
  for (const auto& [name, tensor] : tensors) all += concat(name.size(), " ", name, " ", tensor.text(), "\n");
  if (!config.is_null()) all += concat("config ", canonical(config), "\n");
  return io::digest_of(std::string_view(all));
}

io::Digest Digests::fingerprint() const { return checkpoint::fingerprint(tensors, config); }

Digests digests_of(const fs::path& path, const io::Checkpoint& tensors, const Json& config) {
  Digests result{.tensors = tensors.digests(), .config = config};
  result.residual = residual_of(result.tensors, tensors);
  if (fs::is_directory(path)) result.files = digests_of_files(path, tensors);
  return result;
}

Json digest_metadata(const io::GgufMetadata& metadata) {
  Json json = Json::object();
  for (const auto& entry : metadata) json[entry.key] = digest_value(entry.value);
  return json;
}

Digests digests_of(const io::GgufFile& file) {
  Digests result{.tensors = {}, .config = digest_metadata(file.header().metadata)};
  for (const auto& tensor : file.header().tensors) {
    result.tensors.emplace(tensor.name, io::hash_tensor(ggml_type_name(tensor.type), tensor.shape, file.bytes(tensor)));
    file.release(tensor);
  }
  return result;
}

Digests open_digests(const fs::path& path) {
  if (!fs::is_directory(path) && io::is_gguf(path)) return digests_of(io::GgufFile::open(path));
  const auto config = path / "config.json";
  const bool has_config = fs::is_directory(path) && fs::exists(config);
  return digests_of(path, io::Checkpoint::open(path), has_config ? io::read_json(config) : Json());
}

std::optional<Digests> read_digests(const fs::path& path) {
  const fs::path file = digests_path(path);
  std::error_code unreadable;
  if (!fs::exists(fs::symlink_status(file, unreadable))) return std::nullopt;
  return Reader(file).read();
}

std::vector<io::TensorDigests> bases_of(const fs::path& path) try {
  auto read = read_digests(path);
  return read ? std::move(read->bases) : std::vector<io::TensorDigests>{};
} catch (const Error&) {
  return {};
}

std::vector<io::TensorDigests> bases_through(const Folder& source) {
  auto bases = bases_of(source.path);
  if (source.quantization.linears.empty()) bases.insert(bases.begin(), source.tensors.digests());
  return bases;
}

std::string digests_text(const Digests& digests) {
  io::TensorDigests first = digests.tensors, residual;
  for (const auto& name : digests.residual) residual.insert(first.extract(name));
  Json json = {{"format", format_name},
               {"format_version", format_version},
               {"hash", hash_name},
               {"fingerprint", digests.fingerprint().text()},
               {"tensors", to_json(first)}};
  if (!residual.empty()) json["residual"] = to_json(residual);
  json["files"] = Json::object();
  for (const auto& [name, digest] : digests.files) json["files"][name] = digest.text();
  json["config"] = digests.config;
  json["bases"] = Json::array();
  for (const auto& base : digests.bases) {
    json["bases"].push_back({{"fingerprint", fingerprint(base).text()}, {"tensors", to_json(base)}});
  }
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

void write_digests(const fs::path& path, const Digests& digests, bool overwrite) {
  io::write_file(digests_path(path), digests_text(digests), overwrite);
}

void record_digests(const fs::path& folder, io::TensorDigests written, std::vector<io::TensorDigests> bases) {
  Digests digests{.tensors = std::move(written), .config = io::read_json(folder / "config.json")};
  const auto tensors = io::Checkpoint::open(folder);
  digests.residual = residual_of(digests.tensors, tensors);
  digests.files = digests_of_files(folder, tensors);
  digests.bases = std::move(bases);
  write_digests(folder, digests);
}

void check_digests(const fs::path& path, const io::Checkpoint& tensors) {
  const auto written = read_digests(path);
  tensors.take_digests(written ? written->tensors : io::TensorDigests{});
}

std::vector<std::string> differences(const Digests& written, const Digests& found) {
  std::vector<std::string> faults;
  compare_tensors(written, found, faults);
  compare_config("config.json: ", written.config, found.config, faults);
  compare_files(written, found, faults);
  return faults;
}

std::vector<std::string> base_differences(const io::TensorDigests& expected, const io::TensorDigests& found) {
  const Owners here = owners_of(found), there = owners_of(expected);
  std::vector<std::string> faults;
  for (const auto& [name, tensor] : expected) {
    const auto other = found.find(name);
    if (other != found.end() ? other->second == tensor : here.contains(tensor.digest)) continue;
    faults.push_back(other == found.end() ? concat(printable(name), " is missing")
                                          : concat(printable(name), " ", wrong_tensor(tensor, other->second, there)));
  }
  return faults;
}

}  // namespace w4q::checkpoint
