#include "verify/behaviour/global.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "model/layer_plan.h"

namespace w4q::verify::behaviour {
namespace {

using model::AttentionConfig;
using model::ModelConfig;
using model::NormRole;

/// Of all layers, wherever a config keeps it.
void for_each_rope(ModelConfig& config, const std::function<void(model::RopeConfig& rope)>& use) {
  use(config.rope);
  for (AttentionConfig& attention : config.attention) use(attention.rope);
}

/// Gives a reader the plans that its config makes.
void plan_anew(Reader& reader) {
  size_t place = 0;
  for (int64_t layer = 0; layer < reader.config.layers; ++layer) {
    for (auto& block : layer_plan(reader.config, layer).blocks) {
      reader.places[place++].weights.plan.blocks = {std::move(block)};
    }
  }
}

class GlobalReadings {
 public:
  GlobalReadings(const Reader& reader, std::span<const int32_t> ids,
                 const std::function<void(const GlobalReading&)>& take)
      : reader_(reader), ids_(ids.begin(), ids.end()), take_(take) {}

  void with_config(const std::string& what, const std::function<void(ModelConfig&)>& change) const {
    Reader reader = reader_;
    change(reader.config);
    plan_anew(reader);
    take_({what, std::move(reader), ids_});
  }

  void read_ropes() const {
    const model::RopeConfig& rope = reader_.config.rope;
    for (const double theta : {1e4, 1e5, 5e5, 1e6, 1e7}) {
      if (std::abs(theta / rope.theta - 1) < 0.01) continue;
      with_config(concat("rope_theta ", theta, " in the place of ", rope.theta), [&](ModelConfig& config) {
        for_each_rope(config, [&](model::RopeConfig& each) {
          if (each.theta == rope.theta) each.theta = theta;
        });
      });
    }
    with_config(rope.neighbours ? "rope that turns halves of heads" : "rope that turns neighbouring rows",
                [&](ModelConfig& config) {
                  for_each_rope(config, [](model::RopeConfig& each) { each.neighbours = !each.neighbours; });
                });
    if (rope.type != model::RopeType::standard) {
      with_config("no scaling of rope", [&](ModelConfig& config) {
        for_each_rope(config, [](model::RopeConfig& each) { each.type = model::RopeType::standard; });
      });
    }
  }

  void read_scales() const {
    const auto& silu = reader_.config.activation;
    if (silu == model::Activation::silu || silu == model::Activation::gelu_tanh) {
      with_config(silu == model::Activation::silu ? "GELU in the place of SiLU" : "SiLU in the place of GELU",
                  [&](ModelConfig& config) {
                    config.activation =
                        silu == model::Activation::silu ? model::Activation::gelu_tanh : model::Activation::silu;
                  });
    }
    if (reader_.config.embedding_scale != 1) {
      with_config("embeddings without a factor", [](ModelConfig& config) { config.embedding_scale = 1; });
    }
    if (reader_.config.residual_scale != 1) {
      with_config("blocks without a factor", [](ModelConfig& config) { config.residual_scale = 1; });
    }
  }

  void read_norms() const {
    for (const float by : {1.0F, -1.0F}) {
      Reader reader = reader_;
      for (auto& place : reader.places) {
        for (const auto& norm : place.block().norms) {
          if (norm.role != NormRole::input && norm.role != NormRole::output) continue;
          for (float& value : place.weights.norms[norm.position]) value += by;
        }
      }
      for (float& value : reader.final_norm) value += by;
      take_({by > 0 ? "norms of 1 + w" : "norms of w", std::move(reader), ids_});
    }
  }

 private:
  const Reader& reader_;
  const std::vector<int32_t> ids_;
  const std::function<void(const GlobalReading&)>& take_;
};

}  // namespace

void for_each_global_reading(const Reader& reader, std::span<const int32_t> ids,
                             const std::function<void(const GlobalReading& reading)>& take) {
  const GlobalReadings readings(reader, ids, take);
  readings.read_ropes();
  readings.read_scales();
  readings.read_norms();
}

}  // namespace w4q::verify::behaviour
