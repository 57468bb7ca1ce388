#include "io/weight_files.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "core/text.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "io/system.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view plain_ending = ".safetensors";
constexpr std::string_view compressed_ending = ".safetensors.zst";
constexpr std::string_view index_ending = ".index.json";

Error bad(const fs::path& path, std::string_view problem) {
  return {ErrorCode::bad_file, concat(shown(path), ": ", problem)};
}

bool is_container(std::string_view name) { return name.ends_with(plain_ending) || name.ends_with(compressed_ending); }

bool is_there(const fs::path& path) {
  std::error_code unreadable;  // opening it will say why
  return fs::exists(path, unreadable);
}

/// `path`, or its twin with or without ".zst" when only that one exists.
std::optional<fs::path> existing_variant(const fs::path& path) {
  if (is_there(path)) return path;
  fs::path twin = path;
  if (is_compressed(path)) {
    twin.replace_extension();
  } else {
    twin += ".zst";
  }
  if (is_there(twin)) return twin;
  return std::nullopt;
}

std::vector<std::string> file_names(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().native());
  }
  if (error) throw system_error(folder, "cannot list", error.value());
  std::sort(names.begin(), names.end());
  return names;
}

template <class Predicate>
std::vector<std::string> matching(const std::vector<std::string>& names, Predicate&& predicate) {
  std::vector<std::string> result;
  std::copy_if(names.begin(), names.end(), std::back_inserter(result), predicate);
  return result;
}

/// "a, b, c and 7 more".
std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t most = 5;
  std::vector<std::string> parts;
  for (size_t i = 0; i < std::min(names.size(), most); ++i) parts.push_back(shown(names[i]));
  return join(parts) + (names.size() > most ? concat(" and ", names.size() - most, " more") : "");
}

void check_shard_name(const fs::path& index, const std::string& name) {
  const bool plain = !name.empty() && name.find_first_of("/\\") == std::string::npos &&
                     name.find("..") == std::string::npos && name.find('\0') == std::string::npos;
  if (!plain) {
    throw bad(index, concat("weight_map names \"", shown(name), "\", which is not a plain file name"))
        .hint("a shard must lie beside its index");
  }
  if (!is_container(name)) {
    throw bad(index, concat("weight_map names \"", shown(name), "\", which is not a .safetensors file"))
        .hint("convert the checkpoint to safetensors first");
  }
}

void read_total_size(const Json& root, WeightFiles& files) {
  const auto metadata = root.find("metadata");
  if (metadata == root.end() || !metadata->is_object()) return;
  const auto total = metadata->find("total_size");
  if (total != metadata->end() && total->is_number()) files.total_size = total->get<double>();
}

/// The files that the shard names stand for, in the order of the names.
std::vector<fs::path> find_shards(const fs::path& folder, const std::set<std::string>& names) {
  std::vector<fs::path> shards;
  std::vector<std::string> missing;
  for (const auto& name : names) {
    if (auto path = existing_variant(folder / name)) {
      shards.push_back(*std::move(path));
    } else {
      missing.push_back(name);
    }
  }
  if (!missing.empty()) {
    throw bad(folder / missing.front(), "this shard is missing")
        .detail(concat(missing.size(), " of ", names.size(), " shards are missing: ", list_of(missing)))
        .hint("finish the download");
  }
  return shards;
}

void read_index(const fs::path& path, const Json& root, WeightFiles& files) {
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || map == root.end() || !map->is_object()) {
    throw bad(path, "is not a safetensors index").detail("expected an object with an object \"weight_map\"");
  }
  if (map->empty()) throw bad(path, "weight_map lists no tensors");
  std::set<std::string> names;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      throw bad(path, concat("weight_map gives no file name for tensor \"", shown(tensor), "\""));
    }
    const auto& name = shard.get_ref<const std::string&>();
    if (names.insert(name).second) check_shard_name(path, name);
  }
  files.index_name = path.filename().native();
  files.shards = find_shards(files.folder, names);
  auto& weight_map = files.weight_map.emplace();
  for (const auto& [tensor, shard] : map->items()) {
    const auto place = std::distance(names.begin(), names.find(shard.get_ref<const std::string&>()));
    weight_map.emplace(tensor, static_cast<size_t>(place));
  }
  read_total_size(root, files);
}

/// An index of safetensors files; "pytorch_model.bin.index.json" has the same ending.
bool is_index(std::string_view name) { return name.ends_with(index_ending) && !name.ends_with(".bin.index.json"); }

Error nothing_found(const fs::path& folder, const std::vector<std::string>& names) {
  const auto foreign = matching(names, [](std::string_view name) {
    return name.ends_with(".bin") || name.ends_with(".gguf") || name.ends_with(".pth") || name.ends_with(".pt");
  });
  if (foreign.empty()) {
    return bad(folder, "holds no model weights")
        .detail("expected model.safetensors, or model.safetensors.index.json and its shards");
  }
  return bad(folder, concat("holds no safetensors, only ", list_of(foreign)))
      .detail("w4q reads .safetensors and .safetensors.zst")
      .hint("convert the checkpoint to safetensors first");
}

/// "model-00001-of-00002.safetensors" → 2; 0 where a name counts no shards.
int64_t shards_by_name(std::string_view name) {
  constexpr std::string_view of = "-of-";
  const size_t at = name.find(of);
  int64_t count = 0;
  if (at == std::string_view::npos) return count;
  const char* const begin = name.data() + at + of.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), count);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' ? count : 0;
}

/// Whether an index has tensors in `single` and in other files: one of several files, whatever its name promises.
bool spans_more(const Json& root, std::string_view single) {
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || map == root.end() || !map->is_object()) return false;
  const auto names_it = [&](const Json& file) {
    return file.is_string() && file.get_ref<const std::string&>() == single;
  };
  const auto named = std::count_if(map->begin(), map->end(), names_it);
  return named > 0 && static_cast<size_t>(named) < map->size();
}

/// The index beside a "model.safetensors" of which that is a shard; nothing where it tells of other files, or of that one
/// alone: such an index is left behind, and damaged ones are no better.
///
/// llm-compressor (model_mtp.safetensors) and AutoRound (model_extra_tensors.safetensors) put what transformers has dropped
/// into a second file and name both in an index. transformers, which looks for "model.safetensors" first, reads that alone,
/// as it drops the rest anyhow; servers read all files that an index names, and there the rest has its use.
std::optional<Json> index_around(const fs::path& path, std::string_view single) {
  if (!is_there(path)) return std::nullopt;
  try {
    Json root = read_json(path);
    return spans_more(root, single) ? std::optional(std::move(root)) : std::nullopt;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return std::nullopt;
  }
}

void search_folder(WeightFiles& files) {
  const auto names = file_names(files.folder);
  const auto indices = matching(names, is_index);
  const fs::path usual = files.folder / "model.safetensors.index.json";
  constexpr std::string_view alone = "model.safetensors";
  if (const auto single = existing_variant(files.folder / alone)) {
    if (const auto index = index_around(usual, alone)) return read_index(usual, *index, files);
    files.shards = {*single};
    if (!indices.empty()) {
      files.warnings.push_back(concat(shown(indices.front()), " is ignored: ", shown(single->filename()), " is there"));
    }
    return;
  }
  if (is_there(usual)) return read_index(usual, read_json(usual), files);
  if (indices.size() == 1) {
    const fs::path index = files.folder / indices.front();
    return read_index(index, read_json(index), files);
  }
  if (indices.size() > 1) {
    throw bad(files.folder, "several index files").detail(list_of(indices)).hint("give the one to use as the input");
  }
  const auto containers = matching(names, is_container);
  if (containers.empty()) throw nothing_found(files.folder, names);
  if (containers.size() > 1) {
    throw bad(files.folder, "several safetensors files but no index")
        .detail(list_of(containers))
        .hint("the model.safetensors.index.json is missing: fetch it, or give one file as the input");
  }
  const fs::path file = files.folder / containers.front();
  if (const int64_t all = shards_by_name(containers.front()); all > 1) {
    throw bad(file, concat("is one of ", all, " shards by its name, and there are neither the others nor an index"))
        .hint("finish the download");
  }
  files.shards = {file};
}

}  // namespace

bool is_compressed(const fs::path& path) noexcept { return path.native().ends_with(".zst"); }

bool is_weight_file(std::string_view file_name) noexcept {
  return is_container(file_name) || file_name.ends_with(".safetensors.index.json");
}

WeightFiles find_weight_files(const fs::path& path) {
  WeightFiles files;
  std::error_code error;
  const auto type = fs::status(path, error).type();
  if (type == fs::file_type::directory) {
    files.folder = path;
    search_folder(files);
    return files;
  }
  if (type == fs::file_type::none) throw system_error(path, "cannot open", error.value());
  files.folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const std::string name = path.filename().native();
  if (is_index(name)) {
    read_index(path, read_json(path), files);
  } else if (const auto file = existing_variant(path); !file) {
    throw bad(path, "does not exist").hint("give a model folder, or a .safetensors file");
  } else if (name.ends_with(".bin") || name.ends_with(".gguf") || name.ends_with(".pth") || name.ends_with(".pt")) {
    throw bad(path, "is not a safetensors file").hint("convert the checkpoint to safetensors first");
  } else {
    files.shards = {*file};
  }
  return files;
}

}  // namespace w4q::io
