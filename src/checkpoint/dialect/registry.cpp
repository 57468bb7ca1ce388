#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/rows.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {

std::span<const DialectRow> dialect_registry() {
  // A checkpoint is taken by the first row that detects it.
  static const std::vector<DialectRow> rows = {awq_gemm_row(),
                                               awq_gemv_row(),
                                               awq_gemv_fast_row(),
                                               awq_marlin_row(),
                                               auto_round_row(),
                                               gptq_v1_row(),
                                               gptq_v2_row(),
                                               compressed_tensors_bytes_row(),
                                               compressed_tensors_float_row(),
                                               modelopt_row(),
                                               fp8_row(),
                                               gpt_oss_row(),
                                               humming_row(),
                                               compressed_tensors_padded_row(),
                                               compressed_tensors_row(),
                                               marlin_dialect_row(),
                                               bitsandbytes_nf4_row(),
                                               bitsandbytes_fp4_row(),
                                               exl3_dialect_row()};
  return rows;
}

const DialectRow* find_dialect(std::string_view name) noexcept {
  const auto rows = dialect_registry();
  const auto found = std::ranges::find(rows, name, &DialectRow::name);
  return found == rows.end() ? nullptr : &*found;
}

namespace {

/// Keys that several programs write, and that not every dialect asks for: one of another kind was not made by them.
void check_kinds(const DialectSource& source) {
  for (const char* flag :
       {"zero_point", "sym", "desc_act", "lm_head", "is_marlin_format", "load_in_4bit", "bnb_4bit_use_double_quant"}) {
    config_flag(source, {flag}, false);
  }
  for (const char* text : {"quant_method", "version", "bnb_4bit_quant_type"}) config_text(source, {text}, "");
  // The bits of EXL3 are a mean.
  if (config_text(source, {"quant_method"}, "") == "exl3") return;
  for (const char* width : {"bits", "w_bit"}) config_integer(source, {width}, 4, 1, 64);
  for (const char* group : {"group_size", "q_group_size"}) config_group(source, {group});
}

/// Programs that people may hold folders of, and why no row reads these.
constexpr std::pair<std::string_view, std::string_view> not_read[] = {
    {"torchao", "torchao stores classes of its own, laid out as its version and the processor want them"},
    {"hqq", "zero points of HQQ are no integers, which no layout of integers holds"},
};

}  // namespace

const DialectRow& detect_dialect(const DialectSource& source) {
  check_kinds(source);
  std::vector<std::string> names;
  for (const DialectRow& row : dialect_registry()) {
    if (row.detect(source)) return row;
    names.emplace_back(row.name);
  }
  if (!source.config.contains("quant_method") && source.config.contains("bits")) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": bits and group_size without a quant_method"))
        .detail("as mlx-lm writes them, whose offsets no dialect holds")
        .hint("start from the 16-bit checkpoint");
  }
  const auto method = source.config.value("quant_method", io::Json("(none)")).dump();
  const auto& tensors = source.checkpoint.tensors();
  const auto is_wide = [](const auto& tensor) {
    return tensor.second.shape.size() < 2 || is_weight_dtype(tensor.second.dtype);
  };
  if (!tensors.empty() && std::ranges::all_of(tensors, is_wide)) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": says that weights are quantized, quant_method ",
                                               printable(method), ", but all matrices are in 16 or 32 bit"))
        .hint("take quantization_config out where they are meant to be; else the packed weights were lost");
  }
  for (const auto& [name, reason] : not_read) {
    if (method != concat('"', name, '"')) continue;
    throw Error(ErrorCode::unsupported, concat(source.place, ": quant_method ", method, ": its weights are not read"))
        .detail(std::string(reason))
        .hint("start from the 16-bit checkpoint; verify --for PROGRAM says whether a server loads this one as it is");
  }
  throw Error(ErrorCode::unsupported,
              concat(source.place, ": quant_method ", printable(method), " is no known dialect"))
      .detail("known: w4q, " + join(names))
      .hint("start from the 16-bit checkpoint");
}

}  // namespace w4q::checkpoint
