// The experts of a base as another version of it holds them: in stacks, or one by one.
#pragma once

#include "model/opened.h"

namespace w4q::model {

/// `base` with its experts as `candidate` holds them: those of stacks by the names that they have one by one, those that
/// have such names as rows of stacks, and those one by one by the names that their linears have there; biases go with their
/// weights. Gates and ups stand in a stack as the architecture has them, and of one that is not known as agrees better with
/// what the other holds. A base of few bits, and one whose experts stand as those of `candidate` do, is itself.
OpenedModel experts_like(OpenedModel base, const OpenedModel& candidate);

}  // namespace w4q::model
