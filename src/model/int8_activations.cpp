#include "model/int8_activations.h"

#include "core/error.h"
#include "core/text.h"

namespace w4q::model {
namespace {

std::string passes_text(const formats::PackedLinear& linear) {
  std::vector<formats::Scheme> schemes;
  for (const auto& pass : linear.passes) schemes.push_back(pass.scheme);
  return concat(formats::to_string(schemes), linear.rotations.empty() ? "" : ", rotated");
}

}  // namespace

void refuse_int8_activations(std::string_view layer, std::string_view found) {
  throw Error(ErrorCode::unsupported, concat("no product of int8 activations with ", layer))
      .detail(concat("expected int4 or int8 with 16-bit scales in groups of 32, 64, 128, … or a row, found ", found))
      .hint("leave --activations int8 out");
}

bool any_int8_activations(const Model& model) {
  bool any = false;
  for (const auto& layer : model.layers()) {
    for (const auto& weight : layer.linears) {
      const auto* packed = std::get_if<std::shared_ptr<const formats::PackedLinear>>(&weight.matrix);
      if (packed == nullptr) continue;
      if (!kernels::takes_int8_activations(weight)) refuse_int8_activations(weight.name, passes_text(**packed));
      any = true;
    }
  }
  return any;
}

void refuse_without_int8_activations() { refuse_int8_activations("any layer", "weights of 16 bits"); }

void check_int8_activations(const Model& model) {
  if (!any_int8_activations(model)) refuse_without_int8_activations();
}

}  // namespace w4q::model
