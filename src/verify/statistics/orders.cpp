#include "verify/statistics/orders.h"

#include <algorithm>
#include <numeric>

namespace w4q::verify {
namespace {

constexpr size_t eight_order[8] = {0, 2, 4, 6, 1, 3, 5, 7}, eight_inverse[8] = {0, 4, 1, 5, 2, 6, 3, 7};
/// Heads of every second rank, or of two ranks in turn: of a whole number of pairs of blocks of `width`.
constexpr size_t apart(size_t i, size_t size, size_t width) {
  const size_t block = i / width, half = size / width / 2;
  return (block < half ? 2 * block : 2 * (block - half) + 1) * width + i % width;
}
constexpr size_t in_turn(size_t i, size_t size, size_t width) {
  const size_t block = i / width, half = size / width / 2;
  return (block % 2 == 0 ? block / 2 : half + block / 2) * width + i % width;
}

constexpr ChannelOrder all_orders[] = {
    {"in reverse order", 1, [](size_t i, size_t size) { return size - 1 - i; }},
    {"with its halves exchanged", 2, [](size_t i, size_t size) { return (i + size / 2) % size; }},
    {"with neighbours exchanged in pairs", 2, [](size_t i, size_t) { return i ^ 1; }},
    {"with neighbouring pairs exchanged", 4, [](size_t i, size_t) { return i ^ 2; }},
    {"with neighbouring eights exchanged", 16, [](size_t i, size_t) { return i ^ 8; }},
    {"with each eight in reverse order", 8, [](size_t i, size_t) { return i ^ 7; }},
    {"with each eight in AWQ's order", 8, [](size_t i, size_t) { return i / 8 * 8 + eight_order[i % 8]; }},
    {"with each eight in the inverse of AWQ's order", 8,
     [](size_t i, size_t) { return i / 8 * 8 + eight_inverse[i % 8]; }},
    {"with each 32 in reverse order", 32, [](size_t i, size_t) { return i ^ 31; }},
    {"one place on", 1, [](size_t i, size_t size) { return (i + 1) % size; }},
    {"one place back", 1, [](size_t i, size_t size) { return (i + size - 1) % size; }},
    {"8 places on", 16, [](size_t i, size_t size) { return (i + 8) % size; }},
    {"8 places back", 16, [](size_t i, size_t size) { return (i + size - 8) % size; }},
    {"32 places on", 64, [](size_t i, size_t size) { return (i + 32) % size; }},
    {"32 places back", 64, [](size_t i, size_t size) { return (i + size - 32) % size; }},
    {"64 places on", 128, [](size_t i, size_t size) { return (i + 64) % size; }},
    {"64 places back", 128, [](size_t i, size_t size) { return (i + size - 64) % size; }},
    {"with its middle quarters exchanged", 4,
     [](size_t i, size_t size) {
       const size_t quarter = size / 4, at = i / quarter;
       return at == 1 ? i + quarter : at == 2 ? i - quarter : i;
     }},
    {"with even and odd places apart", 2,
     [](size_t i, size_t size) { return i < size / 2 ? 2 * i : 2 * (i - size / 2) + 1; }},
    {"with even and odd 64s apart", 128, [](size_t i, size_t size) { return apart(i, size, 64); }},
    {"with the 64s of its halves in turn", 128, [](size_t i, size_t size) { return in_turn(i, size, 64); }},
    {"with even and odd 128s apart", 256, [](size_t i, size_t size) { return apart(i, size, 128); }},
    {"with the 128s of its halves in turn", 256, [](size_t i, size_t size) { return in_turn(i, size, 128); }},
    {"with its halves in turn", 2, [](size_t i, size_t size) { return i % 2 == 0 ? i / 2 : size / 2 + i / 2; }},
};

}  // namespace

std::span<const ChannelOrder> channel_orders() noexcept { return all_orders; }

std::vector<double> ranks_beside_neighbours(std::vector<double> series) {
  for (size_t begin = 0; begin < series.size(); begin += channel_neighbours) {
    const size_t end = std::min(begin + channel_neighbours, series.size());
    const double mean = std::accumulate(series.begin() + static_cast<std::ptrdiff_t>(begin),
                                        series.begin() + static_cast<std::ptrdiff_t>(end), 0.0) /
                        static_cast<double>(end - begin);
    for (size_t i = begin; i < end; ++i) series[i] -= mean;
  }
  std::vector<size_t> order(series.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&](size_t i) { return series[i]; });
  std::vector<double> ranks(series.size());
  for (size_t first = 0; first < order.size();) {
    size_t last = first;
    while (last < order.size() && series[order[last]] == series[order[first]]) ++last;
    for (size_t i = first; i < last; ++i) ranks[order[i]] = static_cast<double>(first + last - 1) / 2;
    first = last;
  }
  return ranks;
}

}  // namespace w4q::verify
