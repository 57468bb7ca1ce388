#include "verify/behaviour/orders.h"

#include <functional>
#include <utility>

namespace w4q::verify::behaviour {
namespace {

Order order_of(std::string what, int64_t count, const std::function<int64_t(int64_t)>& from) {
  Order order{std::move(what), std::vector<int64_t>(static_cast<size_t>(count))};
  for (int64_t c = 0; c < count; ++c) order.from[static_cast<size_t>(c)] = from(c);
  return order;
}

}  // namespace

std::vector<Order> orders_of(int64_t count, int64_t head) {
  std::vector<Order> orders;
  const auto add = [&](const char* what, const std::function<int64_t(int64_t)>& from) {
    orders.push_back(order_of(what, count, from));
  };
  add("rows one place on", [&](int64_t c) { return (c + 1) % count; });
  add("rows one place back", [&](int64_t c) { return (c + count - 1) % count; });
  add("rows reversed", [&](int64_t c) { return count - 1 - c; });
  if (count % 2 == 0) {
    add("halves exchanged", [&](int64_t c) { return (c + count / 2) % count; });
    add("neighbouring rows exchanged", [&](int64_t c) { return c ^ 1; });
    add("even rows before odd ones", [&](int64_t c) { return c % 2 * (count / 2) + c / 2; });
    add("two halves in turn", [&](int64_t c) { return c % (count / 2) * 2 + c / (count / 2); });
  }
  const int64_t heads = head > 0 ? count / head : 1;
  if (heads < 2) return orders;
  if (heads > 2) add("heads one place on", [&](int64_t c) { return (c + head) % count; });
  if (heads > 2) add("heads one place back", [&](int64_t c) { return (c + count - head) % count; });
  add("heads reversed", [&](int64_t c) { return (heads - 1 - c / head) * head + c % head; });
  if (heads > 2 && heads % 2 == 0) {
    add("neighbouring heads exchanged", [&](int64_t c) { return (c / head ^ 1) * head + c % head; });
    add("even heads before odd ones", [&](int64_t c) {
      const int64_t h = c / head;
      return (h % 2 * (heads / 2) + h / 2) * head + c % head;
    });
    add("heads of two halves in turn", [&](int64_t c) {
      const int64_t h = c / head;
      return (h % (heads / 2) * 2 + h / (heads / 2)) * head + c % head;
    });
  }
  return orders;
}

std::vector<Order> pair_orders(int64_t count, int64_t head, int64_t turning) {
  const int64_t half = turning / 2;
  const auto within = [&](int64_t c, const std::function<int64_t(int64_t)>& from) {
    return c % head < turning ? c / head * head + from(c % head) : c;
  };
  return {order_of("pairs of neighbours where halves turn", count,
                   [&](int64_t c) { return within(c, [&](int64_t i) { return i % half * 2 + i / half; }); }),
          order_of("pairs of halves where neighbours turn", count,
                   [&](int64_t c) { return within(c, [&](int64_t i) { return i % 2 * half + i / 2; }); })};
}

Activations reordered(const Activations& x, const std::vector<int64_t>& from) {
  Activations result(x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* row = x.view().row(r);
    float* to = result.view().row(r);
    for (int64_t c = 0; c < x.cols; ++c) to[c] = row[from[static_cast<size_t>(c)]];
  }
  return result;
}

Activations times(const Activations& x, float factor) {
  Activations result = x;
  for (float& value : result.values) value *= factor;
  return result;
}

}  // namespace w4q::verify::behaviour
