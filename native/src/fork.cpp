#include "native/fork.hpp"

#include <pthread.h>

#include <atomic>

namespace exeunt::native {

namespace {

std::atomic<std::uint64_t> generation{0};

void count_fork() { generation.fetch_add(1); }

}  // namespace

std::uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void watch_forks() {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
}

}  // namespace exeunt::native
