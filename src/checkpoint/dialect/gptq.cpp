// GPTQ checkpoints: the words of layout gptq, a group for every input, and zero points that version 1 stores less one.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/gptq_config.h"
#include "checkpoint/dialect/gptq_planar.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr std::string_view layout = "gptq";
constexpr int64_t tile = 32;  // of inputs and of outputs
constexpr std::array widths{2, 3, 4, 8};
constexpr std::array scale_types{ScaleType::f16};
constexpr IntegerLimits limits{.bits = widths,
                               .scales = scale_types,
                               .symmetric = false,
                               .act_order = true,
                               .n_multiple = tile,
                               .k_multiple = tile,
                               .kept_scales = detail::every_scale};

/// Of AutoRound, whose config has no order of inputs.
constexpr IntegerLimits ordered_limits = [] {
  IntegerLimits of = limits;
  of.act_order = false;
  return of;
}();

/// In the order of tensors().
constexpr std::array planes_of_tensors{PlaneRole::codes, PlaneRole::zeros, PlaneRole::scales, PlaneRole::group_index};

/// What is added to a stored zero point: version 1 stores it less one.
constexpr int zero_offset(std::string_view format) { return format == "gptq" ? 1 : 0; }

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t groups = formats::integer_groups(scheme, k);
  return {{".qweight", DType::i32, {k / tile * scheme.bits, n}},
          {".qzeros", DType::i32, {groups, n / tile * scheme.bits}},
          {".scales", formats::scale_codec(scheme.scale).dtype, {groups, n}},
          {".g_idx", DType::i32, {k}}};
}

// ---- reading --------------------------------------------------------------------------------------------------------

/// Inputs of a linear: g_idx has one entry for each; without it, words and width tell.
int64_t inputs_of(const io::Checkpoint& checkpoint, const std::string& name, int64_t words, int bits) {
  const std::string index = name + ".g_idx";
  int64_t k = words * 32 / bits;
  if (checkpoint.contains(index)) {
    const Shape& shape = checkpoint.at(index).shape;
    k = shape.size() == 1 ? shape[0] : 0;
  }
  if (k > 0 && k % tile == 0 && k / tile * bits == words) return k;
  Error error(ErrorCode::bad_file,
              concat(printable(name), ".qweight: ", words, " rows of words are no codes of ", bits, " bits"));
  error.detail(concat("config.json says ", bits, " bits; ", k, " inputs have ", k / tile * bits, " rows"));
  if (k > 0 && words * 32 % k == 0) error.hint(concat("the shapes speak for ", words * 32 / k, " bits"));
  throw Error(error);
}

enum class IndexOrder { in_order, all_zero, other };

/// Whether g_idx says more than positions do. Throws bad_file for groups that do not exist.
IndexOrder order_of(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  const Buffer bytes = Buffer::copy_of(checkpoint.load(info.name + ".g_idx")->bytes);
  const auto index = bytes.as<int32_t>();
  const Scheme& scheme = info.passes.front().scheme;
  const int64_t groups = formats::integer_groups(scheme, info.k), size = formats::integer_group_size(scheme, info.k);
  bool in_order = true, all_zero = true;
  for (int64_t col = 0; col < info.k; ++col) {
    const int32_t group = index[static_cast<size_t>(col)];
    if (group < 0 || group >= groups) {
      throw Error(ErrorCode::bad_file, concat(printable(info.name), ".g_idx[", col, "] is ", group))
          .detail(concat("expected a group from 0 to ", groups - 1));
    }
    in_order = in_order && group == col / size;
    all_zero = all_zero && group == 0;
  }
  return in_order ? IndexOrder::in_order : all_zero ? IndexOrder::all_zero : IndexOrder::other;
}

/// The stored zero points of a linear, one byte each; those of version 1 are one less than what they mean.
struct StoredZeros {
  bool symmetric = true;     ///< all are 2^(bits−1)
  int only = -1;             ///< the one value that all have, offset included; −1: there are several
  bool has_wrapped = false;  ///< version 1: a field of ones, which means 0 to some readers and 2^bits to others
};

StoredZeros look_at_zeros(const io::Checkpoint& checkpoint, const PackedLinearInfo& info, int offset) {
  const int bits = info.passes.front().scheme.bits;
  const Buffer words = Buffer::copy_of(checkpoint.load(info.name + ".qzeros")->bytes);
  const auto count = static_cast<int64_t>(words.size()) * 8 / bits;
  std::vector<uint8_t> fields(static_cast<size_t>(count));
  formats::dense_unpack(words.as<uint32_t>(), bits, fields);
  const int ones = (1 << bits) - 1;
  StoredZeros zeros;
  const bool alike = std::ranges::all_of(fields, [&](uint8_t field) { return field == fields.front(); });
  if (alike) zeros.only = fields.front() + offset;
  zeros.symmetric = zeros.only == formats::integer_symmetric_zero(bits);
  zeros.has_wrapped = offset != 0 && std::ranges::find(fields, ones) != fields.end();
  return zeros;
}

/// Symmetric by the config, but the zero points are those of the other version.
[[noreturn]] void refuse_version(const DialectSource& source, const std::string& name, const StoredZeros& zeros,
                                 int symmetric) {
  throw Error(ErrorCode::bad_file, concat(printable(name), ".qzeros: every zero point is ", zeros.only))
      .detail(concat(source.place, " says \"sym\": true, so it would be ", symmetric))
      .hint(concat("the zero points are those of checkpoint_format \"", zeros.only > symmetric ? "gptq_v2" : "gptq",
                   "\", config.json says the other"));
}

/// GPTQ has more formats than the two: "gptq_p" has planes of bits.
void check_format(const DialectSource& source) {
  const std::string format = gptq_format(source);
  if (format == "gptq") return;
  throw Error(ErrorCode::unsupported, concat(source.place, ": checkpoint_format \"", printable(format), "\""))
      .detail("known: gptq, gptq_v2, marlin");
}

class GptqReader {
 public:
  GptqReader(const DialectSource& source, std::string_view format)
      : source_(source), config_(source), offset_(zero_offset(format)) {}

  QuantizationConfig read() {
    for (const auto& name : linears_with(source_.checkpoint, ".qweight")) add(name);
    for (auto& [name, info] : result_.linears) info.passes.front().scheme.asymmetric = !symmetric_;
    if (wrapped_ > 0) {
      result_.notes.push_back(concat(wrapped_,
                                     " linears have zero points stored as all ones, in version 1 either 0 or 2^bits, "
                                     "read as 0; the first is ",
                                     printable(first_wrapped_)));
    }
    if (zero_index_ > 0) {
      result_.notes.push_back(concat(zero_index_, " linears have a g_idx of zeros: inputs are taken in order"));
    }
    if (unsaid_ > 0) {
      result_.notes.push_back(
          concat(unsaid_,
                 " linears have a shuffled g_idx beside \"desc_act\": false, which servers drop and "
                 "decode wrong; the first is ",
                 printable(first_unsaid_)));
    }
    return std::move(result_);
  }

 private:
  void add(const std::string& name) {
    const GptqSetting setting = config_.setting(name);
    const Shape& words = matrix_shape(source_.checkpoint, name + ".qweight");
    Scheme scheme{formats::SchemeFamily::integer,
                  setting.bits,
                  setting.group,
                  integer_scale_type(source_.checkpoint, name + ".scales"),
                  true,
                  false};
    const int64_t n = words[1], k = inputs_of(source_.checkpoint, name, words[0], setting.bits);
    check_sizes(name, n, k);
    auto specs = tensors(scheme, n, k);
    const bool has_index = source_.checkpoint.contains(name + ".g_idx");
    if (!has_index) specs.pop_back();
    PackedLinearInfo info = dialect_linear(name, scheme, n, k, source_.source_dtype, specs);
    check_stored(source_.checkpoint, info,
                 concat("GPTQ with ", setting.bits, " bits and group_size ", group_size_of(scheme)));
    if (setting.left_out) result_.notes.push_back(concat(printable(name), " is packed, config.json says it is not"));
    if (setting.bits == 3) check_planes(info);
    if (has_index) look_at_index(info);
    look_at(info, setting);
    result_.linears.emplace(name, std::move(info));
  }

  void check_sizes(const std::string& name, int64_t n, int64_t k) const {
    formats::check_dimensions(n, k, name);
    if (n % tile == 0) return;
    throw Error(ErrorCode::bad_file, concat(printable(name), ".qweight: ", n, " outputs"))
        .detail("GPTQ has outputs in multiples of 32");
  }

  void check_planes(const PackedLinearInfo& info) const {
    const std::string name = info.name + ".qweight";
    const std::string evidence = planar_evidence(source_.checkpoint.load(name)->bytes, info.n, info.k);
    if (evidence.empty()) return;
    throw Error(ErrorCode::unsupported, concat(printable(name), ": its 3-bit codes stand in planes of bits"))
        .detail(evidence)
        .hint("GPTQModel's checkpoint_format \"gptq_p\", which is not read");
  }

  void look_at_index(PackedLinearInfo& info) {
    const IndexOrder order = order_of(source_.checkpoint, info);
    Scheme& scheme = info.passes.front().scheme;
    scheme.act_order = order == IndexOrder::other && scheme.block != formats::whole_row;
    zero_index_ += order == IndexOrder::all_zero ? 1 : 0;
    if (scheme.act_order && !config_flag(source_, {"desc_act"}, true) && unsaid_++ == 0) first_unsaid_ = info.name;
  }

  void look_at(const PackedLinearInfo& info, const GptqSetting& setting) {
    const StoredZeros zeros = look_at_zeros(source_.checkpoint, info, offset_);
    const int wanted = formats::integer_symmetric_zero(setting.bits);
    if (setting.symmetric && zeros.only == wanted + (offset_ == 0 ? -1 : 1)) {
      refuse_version(source_, info.name, zeros, wanted);
    }
    if (setting.symmetric && !zeros.symmetric) {
      result_.notes.push_back(concat(printable(info.name), " has zero points, config.json says it is symmetric"));
    }
    if (zeros.has_wrapped && wrapped_++ == 0) first_wrapped_ = info.name;
    symmetric_ = symmetric_ && zeros.symmetric;
  }

  const DialectSource& source_;
  GptqConfig config_;
  int offset_;
  bool symmetric_ = true;
  int wrapped_ = 0, zero_index_ = 0, unsaid_ = 0;
  std::string first_wrapped_, first_unsaid_;
  QuantizationConfig result_;
};

// ---- tensors and planes ---------------------------------------------------------------------------------------------

/// Adds `offset` to every field of qzeros, modulo 2^bits.
void shift_zeros(StoredTensor& qzeros, int bits, int offset) {
  if (offset == 0) return;
  const auto words = qzeros.bytes.as<uint32_t>();
  Buffer bytes(words.size() * 32 / static_cast<size_t>(bits));
  const auto fields = bytes.as<uint8_t>();
  formats::dense_unpack(words, bits, fields);
  const int mask = (1 << bits) - 1;
  for (uint8_t& field : fields) field = static_cast<uint8_t>((field + offset) & mask);
  formats::dense_pack(fields, bits, words);
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored, int offset) {
  Scheme scheme = info.passes.front().scheme;
  const bool symmetric = !scheme.asymmetric;
  scheme.asymmetric = true;
  const auto roles = std::span(planes_of_tensors).first(scheme.act_order ? 4 : 3);
  shift_zeros(stored[1], scheme.bits, offset);
  PackedWeight canonical = unpack_stored(layout, scheme, info, std::move(stored), roles);
  return symmetric ? without_zeros(std::move(canonical), info.name) : std::move(canonical);
}

std::vector<int32_t> index_in_order(const Scheme& scheme, int64_t k) {
  std::vector<int32_t> index(static_cast<size_t>(k));
  const int64_t size = formats::integer_group_size(scheme, k);
  for (int64_t col = 0; col < k; ++col) index[static_cast<size_t>(col)] = static_cast<int32_t>(col / size);
  return index;
}

std::vector<StoredTensor> pack(const PackedWeight& canonical) {
  auto specs = tensors(canonical.scheme, canonical.n, canonical.k);
  if (canonical.scheme.act_order) return pack_stored(layout, canonical, std::move(specs), planes_of_tensors);
  StoredTensor index{specs.back(), Buffer::copy_of(bytes_of(index_in_order(canonical.scheme, canonical.k)))};
  auto result = pack_stored(layout, canonical, std::move(specs), std::span(planes_of_tensors).first(3));
  result.push_back(std::move(index));
  return result;
}

std::vector<StoredTensor> encode(const PackedWeight& canonical, int offset) {
  auto tensors = pack(canonical);
  shift_zeros(tensors[1], canonical.scheme.bits, -offset);
  return tensors;
}

DialectFit fit(const PackedLinearInfo& info) { return fit_integer(info, limits); }

/// Version 1 has no place for a zero point of 0.
std::string refuse_zero(const PackedWeight& canonical) {
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto bad = std::ranges::find(zeros, 0);
  if (bad == zeros.end()) return refuse_large_zero(canonical);
  const int64_t groups = formats::integer_groups(canonical.scheme, canonical.k), at = bad - zeros.begin();
  return concat("row ", at / groups, ", group ", at % groups,
                " has the zero point 0: version 1 stores it less one, and readers disagree on what −1 means");
}

/// In groups with the zero point 0: zero and codes go up by one, and only a code that is at its end changes its value.
void raise_zeros(PackedWeight& canonical) {
  const int64_t groups = formats::integer_groups(canonical.scheme, canonical.k);
  const int64_t size = formats::integer_group_size(canonical.scheme, canonical.k);
  const int largest = (1 << canonical.scheme.bits) - 1;
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto index =
      canonical.scheme.act_order ? canonical.plane(PlaneRole::group_index).bytes.as<int32_t>() : std::span<int32_t>{};
  std::vector<uint8_t> codes(static_cast<size_t>(canonical.k));
  for (int64_t row = 0; row < canonical.n; ++row) {
    const auto row_zeros = zeros.subspan(static_cast<size_t>(row * groups), static_cast<size_t>(groups));
    if (std::ranges::find(row_zeros, 0) == row_zeros.end()) continue;
    formats::integer_read_codes(canonical, row, codes);
    for (size_t col = 0; col < codes.size(); ++col) {
      const auto group =
          index.empty() ? static_cast<size_t>(static_cast<int64_t>(col) / size) : static_cast<size_t>(index[col]);
      if (row_zeros[group] == 0 && codes[col] < largest) ++codes[col];
    }
    for (uint8_t& zero : row_zeros) zero = std::max<uint8_t>(zero, 1);
    formats::integer_write_codes(canonical, row, codes);
  }
}

DialectRow common_row() {
  DialectRow row{};
  row.holds = "2, 3, 4, 8 bits, zero points, act-order, f16 scales; inputs and outputs in multiples of 32";
  row.fit = fit;
  row.tensors = tensors;
  row.config_file = "quantize_config.json";
  return row;
}

}  // namespace

DialectRow gptq_v1_row() {
  DialectRow row = common_row();
  row.name = "gptq-v1";
  row.description = "GPTQ, checkpoint_format gptq: AutoGPTQ, GPTQModel, optimum";
  row.detect = [](const DialectSource& source) { return is_gptq(source) && gptq_format(source) != "gptq_v2"; };
  row.read = [](const DialectSource& source) {
    check_format(source);
    return GptqReader(source, "gptq").read();
  };
  row.decode = [](const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
    return decode(info, std::move(stored), zero_offset("gptq"));
  };
  row.encode = [](const PackedWeight& canonical) { return encode(canonical, zero_offset("gptq")); };
  row.describe = [](const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
    return describe_gptq("gptq", linears, kept);
  };
  row.refuses = refuse_zero;
  row.bend = raise_zeros;
  return row;
}

DialectRow auto_round_row() {
  DialectRow row = gptq_v1_row();
  row.name = "auto-round";
  row.description = "AutoRound over the words of gptq-v1: packing_format auto_round:auto_gptq";
  row.holds = "2, 3, 4, 8 bits, zero points from 1, f16 scales; inputs and outputs in multiples of 32; no act-order";
  row.detect = [](const DialectSource& source) {
    return auto_round_words(source) == "gptq" && gptq_format(source) != "gptq_v2";
  };
  row.fit = [](const PackedLinearInfo& info) { return fit_integer(info, ordered_limits); };
  row.describe = describe_auto_round;
  row.config_file = "quantization_config.json";
  return row;
}

DialectRow gptq_v2_row() {
  DialectRow row = common_row();
  row.name = "gptq-v2";
  row.description = "GPTQ, checkpoint_format gptq_v2: zero points as they are";
  row.detect = [](const DialectSource& source) { return is_gptq(source) && gptq_format(source) == "gptq_v2"; };
  row.read = [](const DialectSource& source) { return GptqReader(source, "gptq_v2").read(); };
  row.decode = [](const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
    return decode(info, std::move(stored), 0);
  };
  row.encode = [](const PackedWeight& canonical) { return encode(canonical, 0); };
  row.describe = [](const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
    return describe_gptq("gptq_v2", linears, kept);
  };
  row.refuses = refuse_large_zero;
  return row;
}

}  // namespace w4q::checkpoint
