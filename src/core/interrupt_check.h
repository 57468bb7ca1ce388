// What else may end work from outside, looked for where a signal is.
#pragma once

namespace w4q {

/// check_interrupt() calls `check` too, in whatever thread it is called; it may throw. Null: nothing. Set while nothing
/// works.
void set_interrupt_check(void (*check)()) noexcept;

}  // namespace w4q
