// What tests/peers/check_gradients.py holds against autograd: gradient_sums MODEL IDS SAMPLES LENGTH OUT writes into the folder
// OUT, as model.safetensors, for every linear of the layers NAME [n·(n+1)/2] in f64, the upper triangle of Σ g·gᵀ row by row,
// g the gradient of the summed cross entropy by its outputs; "loss" [1] in nats; and "ids" [SAMPLES, LENGTH], the windows.
#include <cstdlib>
#include <iostream>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/views.h"
#include "io/checkpoint_writer.h"
#include "model/opened.h"
#include "pipeline/gradients.h"
#include "tokenizer/token_file.h"

namespace {

using namespace w4q;

void write(const model::OpenedModel& model, const pipeline::CalibrationWindows& windows, const std::string& to) {
  pipeline::GradientWalk walk(model, windows, {});
  std::vector<pipeline::LinearGradients> all;
  for (int64_t layer = model.config.layers; layer-- > 0;) {
    for (auto& sums : walk.next()) all.push_back(std::move(sums));
  }
  std::vector<io::PlannedTensor> plan{{"ids", DType::i32, {windows.samples, windows.length}},
                                      {"loss", DType::f64, {1}}};
  for (const auto& sums : all) plan.push_back({sums.name, DType::f64, {std::ssize(sums.outputs.gram)}});
  std::filesystem::create_directories(to);
  io::CheckpointWriter writer(to, plan, {});
  writer.write("ids", bytes_of(windows.ids));
  writer.write("loss", bytes_of(std::vector{walk.loss()}));
  for (const auto& sums : all) {
    writer.write(sums.name, bytes_of(std::vector<double>(sums.outputs.gram.begin(), sums.outputs.gram.end())));
  }
  writer.finish();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "gradient_sums MODEL IDS SAMPLES LENGTH OUT\n";
    return 2;
  }
  try {
    set_progress_enabled(false);
    const auto model = model::open_model(argv[1]);
    const auto ids = tokenizer::read_ids(argv[2], model.config.vocab_size);
    write(model, pipeline::cut_windows(ids, std::atoll(argv[3]), std::atoll(argv[4]), argv[2]), argv[5]);
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
