#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>

namespace exeunt::native {

/// What device bytes are for; all three count against one limit (invariant 1).
enum class DeviceUse : std::size_t { kWeights = 0, kRing = 1, kTorch = 2 };
/// What pinned host bytes are for; likewise.
enum class HostUse : std::size_t { kRegistered = 0, kSlab = 1, kStaging = 2 };

inline constexpr std::size_t kNumUses = 3;

struct BudgetSnapshot {
    std::size_t limit_bytes = 0;
    std::size_t used_bytes = 0;
    std::size_t peak_bytes = 0;
    std::array<std::size_t, kNumUses> used_by_use{};
    std::array<std::size_t, kNumUses> peak_by_use{};
};

/// A limit in bytes and what is held against it. Thread-safe.
class Budget : public std::enable_shared_from_this<Budget> {
  public:
    explicit Budget(std::size_t limit_bytes) { numbers_.limit_bytes = limit_bytes; }

    /// Bytes held against a budget, given back when it goes.
    class Charge {
      public:
        Charge(std::shared_ptr<Budget> budget, std::size_t use, std::size_t nbytes)
            : budget_(std::move(budget)), use_(use), nbytes_(nbytes) {}
        ~Charge() {
            if (budget_) {
                budget_->credit(use_, nbytes_);
            }
        }
        Charge(Charge&& other) noexcept = default;
        Charge& operator=(Charge&&) = delete;
        Charge(const Charge&) = delete;
        Charge& operator=(const Charge&) = delete;

        [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }

      private:
        std::shared_ptr<Budget> budget_;
        std::size_t use_;
        std::size_t nbytes_;
    };

    /// Nothing when the limit would be passed: that is an answer, not an error (invariant 12).
    template <typename Use>
    [[nodiscard]] std::optional<Charge> try_charge(Use use, std::size_t nbytes) {
        const auto index = static_cast<std::size_t>(use);
        const std::lock_guard lock(mutex_);
        if (nbytes > numbers_.limit_bytes - numbers_.used_bytes) {
            return std::nullopt;
        }
        numbers_.used_bytes += nbytes;
        numbers_.used_by_use[index] += nbytes;
        raise(numbers_.peak_bytes, numbers_.used_bytes);
        raise(numbers_.peak_by_use[index], numbers_.used_by_use[index]);
        return Charge(shared_from_this(), index, nbytes);
    }

    [[nodiscard]] BudgetSnapshot snapshot() const {
        const std::lock_guard lock(mutex_);
        return numbers_;
    }
    [[nodiscard]] std::size_t free_bytes() const {
        const std::lock_guard lock(mutex_);
        return numbers_.limit_bytes - numbers_.used_bytes;
    }
    [[nodiscard]] std::size_t limit_bytes() const noexcept { return numbers_.limit_bytes; }

  private:
    static void raise(std::size_t& peak, std::size_t value) { peak = value > peak ? value : peak; }
    void credit(std::size_t use, std::size_t nbytes) {
        const std::lock_guard lock(mutex_);
        numbers_.used_bytes -= nbytes;
        numbers_.used_by_use[use] -= nbytes;
    }

    mutable std::mutex mutex_;  // guards numbers_, whose limit never changes
    BudgetSnapshot numbers_;
};

}  // namespace exeunt::native
