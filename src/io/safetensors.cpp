#include "io/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "core/text.h"
#include "io/strict_sax.h"

namespace w4q::io {
namespace {

constexpr std::string_view metadata_key = "__metadata__";
/// Tools that read only headers over the network stop here.
constexpr uint64_t portable_header_bytes = 25'000'000;

/// Reads the JSON of a header straight into a SafetensorsHeader.
class HeaderReader : public StrictSax {
 public:
  using StrictSax::StrictSax;

  SafetensorsHeader take() {
    if (unknown_fields_ != 0) {
      header_.warnings.push_back(
          concat(unknown_fields_, " unknown fields in tensor entries are ignored, the first is ", first_unknown_));
    }
    return std::move(header_);
  }

  bool null() { return key_ == metadata_key && place() == Place::root ? true : scalar("null"); }
  bool boolean(bool flag) { return scalar(flag ? "true" : "false"); }
  bool number_integer(int64_t number) { return scalar(std::to_string(number)); }
  bool number_float(double /*number*/, const std::string& text) { return scalar(text); }

  bool number_unsigned(uint64_t number) {
    if (place() == Place::shape) {
      shape_.push_back(number);
    } else if (place() == Place::offsets) {
      offsets_.push_back(number);
    } else {
      return scalar(std::to_string(number));
    }
    return true;
  }

  bool string(std::string& text) {
    if (place() == Place::metadata) {
      header_.metadata[key_] = std::move(text);
    } else if (place() == Place::entry && key_ == "dtype") {
      dtype_ = parse_dtype(text);
      if (!dtype_) throw tensor_error(concat("unknown dtype \"", shown(text), "\""));
    } else {
      return scalar(concat("\"", shown(text), "\""));
    }
    return true;
  }

  bool key(std::string& text) {
    key_ = text;
    if (place() == Place::root) name_ = text;
    if (place() == Place::entry && text != "dtype" && text != "shape" && text != "data_offsets") {
      if (unknown_fields_++ == 0) first_unknown_ = concat("\"", shown(text), "\" of \"", shown(name_), "\"");
    }
    add_key(text);
    return true;
  }

  bool start_object(size_t /*size*/) {
    switch (place()) {
      case Place::outside:
        return enter(Place::root);
      case Place::root:
        return key_ == metadata_key ? enter(Place::metadata) : start_entry();
      case Place::entry:
        if (is_known_field()) break;
        return enter(Place::unknown);
      case Place::unknown:
        return enter(Place::unknown);
      default:
        break;
    }
    return scalar("an object");
  }

  bool start_array(size_t /*size*/) {
    if (place() == Place::unknown || (place() == Place::entry && !is_known_field())) return enter(Place::unknown);
    if (place() == Place::entry && key_ == "shape") {
      shape_seen_ = true;
      return enter(Place::shape);
    }
    if (place() == Place::entry && key_ == "data_offsets") return enter(Place::offsets);
    return scalar("an array");
  }

  bool end_object() {
    close_object();
    const Place closed = place();
    places_.pop_back();
    if (closed == Place::entry) end_entry();
    return true;
  }

  bool end_array() {
    close_array();
    places_.pop_back();
    return true;
  }

 private:
  enum class Place { outside, root, metadata, entry, shape, offsets, unknown };

  Place place() const noexcept { return places_.empty() ? Place::outside : places_.back(); }

  bool is_known_field() const noexcept { return key_ == "dtype" || key_ == "shape" || key_ == "data_offsets"; }

  bool enter(Place inner) {
    open();
    places_.push_back(inner);
    return true;
  }

  bool start_entry() {
    dtype_.reset();
    shape_.clear();
    shape_seen_ = false;
    offsets_.clear();
    return enter(Place::entry);
  }

  void end_entry() {
    if (!dtype_) throw tensor_error("has no dtype");
    if (!shape_seen_) throw tensor_error("has no shape");
    if (offsets_.size() != 2) {
      throw tensor_error(concat("expected 2 data_offsets, found ", offsets_.size()));
    }
    TensorInfo tensor{name_, *dtype_, {}, offsets_[0], offsets_[1]};
    // A dimension above 2^63 can only belong to a tensor without elements: any other would exceed the file.
    for (const uint64_t dim : shape_) tensor.shape.push_back(static_cast<int64_t>(dim));
    header_.tensors.push_back(std::move(tensor));
  }

  Error tensor_error(std::string_view problem) const {
    return error(concat("tensor \"", shown(name_), "\": ", problem));
  }

  /// A value that stands where only certain others may.
  bool scalar(std::string_view found) {
    const auto expected = [&](std::string_view what) { return concat("expected ", what, ", found ", shown(found)); };
    switch (place()) {
      case Place::outside:
        throw error(expected("an object of tensors"));
      case Place::root:
        if (key_ == metadata_key) throw error(concat(metadata_key, ": ", expected("an object of strings")));
        throw tensor_error(expected("an object"));
      case Place::metadata:
        throw error(concat(metadata_key, ": \"", shown(key_), "\": ", expected("a string")));
      case Place::shape:
        throw tensor_error("shape: " + expected("unsigned 64-bit integers"));
      case Place::offsets:
        throw tensor_error("data_offsets: " + expected("unsigned 64-bit integers"));
      case Place::entry:
        if (is_known_field())
          throw tensor_error(concat(key_, ": ", expected(key_ == "dtype" ? "a string" : "an array")));
        return true;
      case Place::unknown:
        return true;
    }
    return true;
  }

  SafetensorsHeader header_;
  std::vector<Place> places_;
  std::string key_;   ///< the last key read
  std::string name_;  ///< the tensor whose entry is being read
  std::optional<DType> dtype_;
  std::vector<uint64_t> shape_;
  bool shape_seen_ = false;
  std::vector<uint64_t> offsets_;
  size_t unknown_fields_ = 0;
  std::string first_unknown_;
};

/// Checks 1 to 3: where the header ends.
uint64_t header_size(std::span<const std::byte> prefix, uint64_t file_size, std::string_view file) {
  const auto fail = [&](std::string_view problem) {
    return Error(ErrorCode::bad_file, concat(shown(file), ": ", problem));
  };
  if (file_size < 8) {
    throw fail("too short for a safetensors file").detail(concat("expected at least 8 bytes, found ", file_size));
  }
  ensure(prefix.size() >= 8, "parse_safetensors: the prefix is shorter than 8 bytes");
  uint64_t size = 0;
  for (size_t i = 8; i-- > 0;) size = size << 8 | static_cast<uint8_t>(prefix[i]);
  if (size > max_header_bytes) {
    auto error = fail("is not a safetensors file, or its header is damaged")
                     .detail(concat("header length ", size, ", at most ", max_header_bytes, " is allowed"));
    constexpr std::string_view pointer_start = "version ";  // the text that Git leaves in place of a large file
    const std::string_view text(reinterpret_cast<const char*>(prefix.data()), 8);
    if (text == pointer_start) {
      error.hint("this looks like a Git LFS pointer: fetch the file itself with git lfs pull");
    } else if (text.starts_with('<')) {
      error.hint("this looks like a web page: what the download was answered stands in it");
    } else if (text.starts_with('{')) {
      error.hint("this looks like JSON: give the folder that holds it, or a .safetensors file");
    }
    throw error;
  }
  if (size > file_size - 8) {
    throw fail("is cut short inside its header")
        .detail(concat("expected at least ", size + 8, " bytes, found ", file_size))
        .hint("download or copy the file again");
  }
  return size;
}

/// Checks 7 to 9: type, shape and range of one tensor agree.
void check_size(const TensorInfo& tensor, std::string_view file) {
  const auto fail = [&](std::string_view problem) {
    return Error(ErrorCode::bad_file, concat(shown(file), ": tensor \"", shown(tensor.name), "\": ", problem));
  };
  uint64_t count = 1;
  for (const int64_t dim : tensor.shape) {
    if (__builtin_mul_overflow(count, static_cast<uint64_t>(dim), &count))
      throw fail("the shape has too many elements");
  }
  uint64_t bits = 0;
  if (__builtin_mul_overflow(count, static_cast<uint64_t>(dtype_bits(tensor.dtype)), &bits)) {
    throw fail("the shape has too many elements");
  }
  const std::string what = concat(dtype_name(tensor.dtype), " ", shape_text(tensor.shape));
  if (bits % 8 != 0) throw fail(concat(what, " does not fill whole bytes: ", bits, " bits"));
  if (bits / 8 != tensor.size()) {
    throw fail("its range does not fit its shape")
        .detail(concat(what, " needs ", bits / 8, " bytes, data_offsets give ", tensor.size()));
  }
}

/// Check 6: the tensors fill the data buffer without gap and overlap. Returns where they end.
uint64_t check_ranges(const std::vector<TensorInfo>& tensors, std::string_view file) {
  uint64_t run = 0;
  const TensorInfo* previous = nullptr;
  for (const auto& tensor : tensors) {
    const auto fail = [&](std::string_view problem) {
      return Error(ErrorCode::bad_file, concat(shown(file), ": tensor \"", shown(tensor.name), "\": ", problem))
          .detail(concat("data_offsets [", tensor.begin, ", ", tensor.end, "], expected to begin at ", run));
    };
    if (tensor.end < tensor.begin) throw fail("ends before it begins");
    if (tensor.begin > run) throw fail("leaves unused bytes before it");
    if (tensor.begin < run) throw fail(concat("overlaps tensor \"", shown(previous->name), "\""));
    check_size(tensor, file);
    run = tensor.end;
    previous = &tensor;
  }
  return run;
}

/// Check 10: the file ends where the last tensor ends.
void check_end(uint64_t data_begin, uint64_t data_size, uint64_t file_size, std::string_view file) {
  if (data_size == file_size - data_begin) return;
  const bool cut = data_size > file_size - data_begin;
  const std::string expected = data_size <= std::numeric_limits<uint64_t>::max() - data_begin
                                   ? std::to_string(data_begin + data_size)
                                   : "more than 2^64";
  throw Error(ErrorCode::bad_file, concat(shown(file), cut ? ": is cut short" : ": has bytes behind the last tensor"))
      .detail(concat("expected ", expected, " bytes by its header, found ", file_size))
      .hint("download or copy the file again");
}

SafetensorsHeader parse_header(std::span<const std::byte> prefix, uint64_t file_size, std::string_view file_name) {
  const uint64_t size = header_size(prefix, file_size, file_name);
  ensure(prefix.size() >= 8 + size, "parse_safetensors: the prefix does not hold the whole header");
  const std::string_view json(reinterpret_cast<const char*>(prefix.data()) + 8, size);

  HeaderReader reader(json, file_name);
  parse_strict(json, file_name, reader);
  SafetensorsHeader header = reader.take();
  header.data_begin = 8 + size;
  if (json.front() != '{') header.warnings.emplace_back("the header starts with white space");
  if (size > portable_header_bytes) {
    header.warnings.push_back(concat("the header has ", human_bytes(static_cast<int64_t>(size)),
                                     ": some tools refuse more than ",
                                     human_bytes(static_cast<int64_t>(portable_header_bytes))));
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  check_end(header.data_begin, check_ranges(header.tensors, file_name), file_size, file_name);
  return header;
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> prefix, uint64_t file_size,
                                    std::string_view file_name) try {
  return parse_header(prefix, file_size, file_name);
} catch (Error& error) {
  if (error.hint().empty())
    error.hint("download or copy the file again; if that changes nothing, it was written wrong");
  throw;
}

}  // namespace w4q::io
