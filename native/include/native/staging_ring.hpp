#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "native/event_fence.hpp"
#include "native/host_memory.hpp"
#include "native/unit.hpp"

namespace exeunt::native {

struct StagingOptions {
    std::size_t num_buffers = 4;
    /// A multiple of 4096.
    std::size_t buffer_bytes = std::size_t{8} << 20;
    std::size_t num_threads = 2;
    /// Read past the page cache where possible: for files larger than the memory for it.
    bool prefers_direct = false;
};

/// A unit's staged copies on their way. Complete when all are enqueued, or one has failed and the
/// rest are over; either way `done` was recorded after them on the copy stream.
class StagedTransfer {
  public:
    /// Blocks the host until complete; returns the failure, if any.
    [[nodiscard]] std::exception_ptr wait();
    /// The same for at most `seconds`; nothing while it is still on its way.
    [[nodiscard]] std::optional<std::exception_ptr> wait_for(double seconds);
    [[nodiscard]] bool is_complete() const;

  private:
    friend class StagingRing;
    std::shared_ptr<const CopyPlan> plan_;
    cuda::DevicePtr base_ = 0;
    cuda::Stream stream_ = nullptr;
    std::shared_ptr<EventFence> done_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable completed_;
    std::size_t num_remaining_ = 0;
    std::exception_ptr failure_;
};

/// Pinned buffers that reader threads fill from files and copy from: the tier for files that
/// cannot be registered or would not fit below the limit of pinned bytes.
class StagingRing {
  public:
    /// OutOfMemory when the buffers do not fit below the limit of pinned bytes.
    StagingRing(std::shared_ptr<Device> device, const std::shared_ptr<Budget>& host_budget,
                const StagingOptions& options);
    /// Finishes what was started and waits for its copies.
    ~StagingRing();
    StagingRing(const StagingRing&) = delete;
    StagingRing& operator=(const StagingRing&) = delete;

    /// Begins the plan's staged copies to `base`, in order behind the work that `stream` has now;
    /// records `done` on `stream` after the last. Never waits for a disk or the device.
    [[nodiscard]] std::shared_ptr<StagedTransfer> start(std::shared_ptr<const CopyPlan> plan,
                                                        cuda::DevicePtr base, cuda::Stream stream,
                                                        std::shared_ptr<EventFence> done);

  private:
    struct Buffer {
        std::unique_ptr<PinnedBuffer> memory;
        std::unique_ptr<EventFence> drained;  // its last copy
    };
    /// Part of one copy that fits one buffer.
    struct Chunk {
        std::shared_ptr<StagedTransfer> transfer;
        const Copy* copy;
        std::size_t begin;
        std::size_t nbytes;
    };
    /// What the threads share; a forked child, which has no such threads, leaves it alone.
    struct Workers {
        std::mutex mutex;  // guards the queues and is_stopping
        std::condition_variable changed;
        std::deque<Chunk> chunks;
        std::deque<Buffer*> free_buffers;
        bool is_stopping = false;
        std::vector<Buffer> buffers;
        std::vector<std::thread> threads;
    };

    void run();
    void move_chunk(const Chunk& chunk, Buffer& buffer) const;
    /// How many bytes of the buffer come before the chunk's.
    std::size_t read_chunk(const Chunk& chunk, const Buffer& buffer) const;
    static void finish_chunk(const Chunk& chunk, std::exception_ptr failure);
    void stop() noexcept;

    const std::shared_ptr<Device> device_;
    const StagingOptions options_;
    std::unique_ptr<Workers> workers_;
    Live<ObjectKind::kStaging> live_;
};

}  // namespace exeunt::native
