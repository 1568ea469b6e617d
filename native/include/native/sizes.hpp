#pragma once

#include <bit>
#include <cstddef>
#include <limits>
#include <string>

#include "native/error.hpp"

namespace exeunt::native {

/// Sum of two byte counts; SizeError when it does not fit (invariant 8).
[[nodiscard]] inline std::size_t checked_add(std::size_t left, std::size_t right,
                                             const char* what) {
    if (left > std::numeric_limits<std::size_t>::max() - right) {
        throw SizeError(std::string(what) + " overflows: " + std::to_string(left) + " + " +
                        std::to_string(right) + " bytes; ask for less");
    }
    return left + right;
}

/// Product of two counts; SizeError when it does not fit.
[[nodiscard]] inline std::size_t checked_multiply(std::size_t left, std::size_t right,
                                                  const char* what) {
    if (right != 0 && left > std::numeric_limits<std::size_t>::max() / right) {
        throw SizeError(std::string(what) + " overflows: " + std::to_string(left) + " x " +
                        std::to_string(right) + " bytes; ask for less");
    }
    return left * right;
}

/// Smallest multiple of `alignment` (a power of two) that is not below `nbytes`.
[[nodiscard]] inline std::size_t align_up(std::size_t nbytes, std::size_t alignment,
                                          const char* what) {
    return checked_add(nbytes, alignment - 1, what) & ~(alignment - 1);
}

[[nodiscard]] constexpr std::size_t align_down(std::size_t nbytes, std::size_t alignment) {
    return nbytes & ~(alignment - 1);
}

/// Throws SizeError unless `[offset, offset + nbytes)` is a non-empty part of `[0, limit)`.
inline void check_within(std::size_t offset, std::size_t nbytes, std::size_t limit,
                         const char* what) {
    if (nbytes == 0) {
        throw SizeError(std::string(what) + " has 0 bytes; ask for at least 1");
    }
    if (offset > limit || nbytes > limit - offset) {
        throw SizeError(std::string(what) + " of " + std::to_string(nbytes) + " bytes at offset " +
                        std::to_string(offset) + " ends beyond " + std::to_string(limit) +
                        " bytes; stay within");
    }
}

inline void check_power_of_two(std::size_t value, const char* what) {
    if (!std::has_single_bit(value)) {
        throw SizeError(std::string(what) + " is " + std::to_string(value) +
                        " bytes but must be a power of two");
    }
}

}  // namespace exeunt::native
