// Orders in which channels are found by mistake, and ranks of channels beside their neighbours.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace w4q::verify {

/// Another order of a series: entry i is the one that stands at from(i, size).
struct ChannelOrder {
  std::string_view name;
  size_t multiple;  ///< of which the size must be one
  size_t (*from)(size_t i, size_t size);
};
std::span<const ChannelOrder> channel_orders() noexcept;

/// Channels whose mean is taken out.
inline constexpr size_t channel_neighbours = 16;

/// Ranks of what differs from the mean of 16 neighbours, so that neither sizes of heads nor single loud channels speak.
std::vector<double> ranks_beside_neighbours(std::vector<double> series);

}  // namespace w4q::verify
