#pragma once

// Shared by the two sources of the fake driver.

#include <cstddef>
#include <cstdint>

// Counts the call and returns early when it is the one that is to fail. A macro, since the early
// return belongs to some forty short functions.
#define EXEUNT_FAKE_CALL()                                                          \
    if (const cuda::Status fault = begin_call(); fault != cuda::Status::kSuccess) { \
        return fault;                                                               \
    }                                                                               \
    const std::lock_guard lock(mutex_)

namespace exeunt::native {

inline bool overlap(std::uint64_t left, std::size_t left_nbytes, std::uint64_t right,
                    std::size_t right_nbytes) {
    return left < right + right_nbytes && right < left + left_nbytes;
}

}  // namespace exeunt::native
