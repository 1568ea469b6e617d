#include "native/staging_ring.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

std::exception_ptr StagedTransfer::wait() {
    std::unique_lock lock(mutex_);
    completed_.wait(lock, [this] { return num_remaining_ == 0; });
    return failure_;
}

std::optional<std::exception_ptr> StagedTransfer::wait_for(double seconds) {
    std::unique_lock lock(mutex_);
    if (!completed_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [this] { return num_remaining_ == 0; })) {
        return std::nullopt;
    }
    return failure_;
}

bool StagedTransfer::is_complete() const {
    const std::lock_guard lock(mutex_);
    return num_remaining_ == 0;
}

StagingRing::StagingRing(std::shared_ptr<Device> device, const std::shared_ptr<Budget>& host_budget,
                         const StagingOptions& options)
    : device_(std::move(device)), options_(options), workers_(std::make_unique<Workers>()) {
    device_->refuse_after_fork();
    if (options.buffer_bytes == 0 || options.buffer_bytes % kDirectAlignment != 0) {
        throw SizeError("a staging buffer of " + std::to_string(options.buffer_bytes) +
                        " bytes is no multiple of " + std::to_string(kDirectAlignment) +
                        " bytes; round it up");
    }
    if (options.num_threads == 0 || options.num_buffers < options.num_threads) {
        throw SizeError(std::to_string(options.num_buffers) + " staging buffers cannot keep " +
                        std::to_string(options.num_threads) +
                        " reader threads busy; give at least 1 thread and a buffer for each");
    }
    (void)checked_multiply(options.num_buffers, options.buffer_bytes, "a staging ring");
    for (std::size_t index = 0; index < options.num_buffers; ++index) {
        auto charge = host_budget->try_charge(HostUse::kStaging, options.buffer_bytes);
        if (!charge) {
            throw OutOfMemory("a pinned staging buffer", options.buffer_bytes,
                              host_budget->free_bytes(), host_budget->limit_bytes(),
                              host_budget->free_bytes());
        }
        auto memory = std::make_unique<PinnedBuffer>(device_, std::move(*charge));
        workers_->buffers.push_back({std::move(memory), std::make_unique<EventFence>(device_)});
    }
    for (Buffer& buffer : workers_->buffers) {
        workers_->free_buffers.push_back(&buffer);
    }
    try {
        for (std::size_t index = 0; index < options.num_threads; ++index) {
            workers_->threads.emplace_back([this] { run(); });
        }
    } catch (...) {
        stop();
        throw;
    }
}

StagingRing::~StagingRing() {
    if (device_->is_forked()) {
        // The threads are the parent's; even destroying their condition variable could hang.
        [[maybe_unused]] Workers* const abandoned = workers_.release();
        return;
    }
    stop();
    for (const Buffer& buffer : workers_->buffers) {
        buffer.drained->synchronize_quietly();
    }
}

void StagingRing::stop() noexcept {
    {
        const std::lock_guard lock(workers_->mutex);
        workers_->is_stopping = true;
    }
    workers_->changed.notify_all();
    for (std::thread& thread : workers_->threads) {
        thread.join();
    }
    workers_->threads.clear();
}

std::shared_ptr<StagedTransfer> StagingRing::start(std::shared_ptr<const CopyPlan> plan,
                                                   cuda::DevicePtr base, cuda::Stream stream,
                                                   std::shared_ptr<EventFence> done) {
    auto transfer = std::make_shared<StagedTransfer>();
    std::deque<Chunk> chunks;
    for (const Copy& copy : plan->staged) {
        for (std::size_t begin = 0; begin < copy.nbytes;) {
            // Direct reads start at a multiple of 4096, so a chunk may have to skip its first
            // bytes in the buffer.
            const std::size_t skipped = (copy.file_offset + begin) % kDirectAlignment;
            const std::size_t nbytes =
                std::min(copy.nbytes - begin, options_.buffer_bytes - skipped);
            chunks.push_back({transfer, &copy, begin, nbytes});
            begin += nbytes;
        }
    }
    transfer->num_remaining_ = chunks.size();
    transfer->plan_ = std::move(plan);
    transfer->base_ = base;
    transfer->stream_ = stream;
    transfer->done_ = std::move(done);
    {
        const std::lock_guard lock(workers_->mutex);
        std::ranges::move(chunks, std::back_inserter(workers_->chunks));
    }
    workers_->changed.notify_all();
    return transfer;
}

void StagingRing::run() {
    Workers& workers = *workers_;
    std::unique_lock lock(workers.mutex);
    for (;;) {
        workers.changed.wait(lock, [&] {
            return (!workers.chunks.empty() && !workers.free_buffers.empty()) ||
                   (workers.is_stopping && workers.chunks.empty());
        });
        if (workers.chunks.empty()) {
            return;
        }
        const Chunk chunk = std::move(workers.chunks.front());
        workers.chunks.pop_front();
        Buffer* const buffer = workers.free_buffers.front();
        workers.free_buffers.pop_front();
        lock.unlock();
        std::exception_ptr failure;
        try {
            move_chunk(chunk, *buffer);
        } catch (...) {
            failure = std::current_exception();
        }
        finish_chunk(chunk, std::move(failure));
        lock.lock();
        workers.free_buffers.push_back(buffer);
        workers.changed.notify_one();
    }
}

void StagingRing::move_chunk(const Chunk& chunk, Buffer& buffer) const {
    // The copy out of this buffer may still read it; overwriting it now would corrupt that unit.
    buffer.drained->synchronize();
    const Copy& copy = *chunk.copy;
    std::size_t skipped = 0;
    if (copy.file) {
        skipped = read_chunk(chunk, buffer);
    } else {
        std::memcpy(buffer.memory->data(), copy.address + chunk.begin, chunk.nbytes);
    }
    const StagedTransfer& transfer = *chunk.transfer;
    const Copy part{buffer.memory->data() + skipped, chunk.nbytes, copy.target_offset + chunk.begin,
                    nullptr, 0};
    enqueue_copies(*device_, std::span(&part, 1), transfer.base_, transfer.stream_);
    buffer.drained->record(transfer.stream_);
}

std::size_t StagingRing::read_chunk(const Chunk& chunk, const Buffer& buffer) const {
    const Copy& copy = *chunk.copy;
    const std::size_t wanted = copy.file_offset + chunk.begin;
    const std::size_t begin = align_down(wanted, kDirectAlignment);
    const std::size_t skipped = wanted - begin;
    const std::size_t end = std::min(
        align_up(wanted + chunk.nbytes, kDirectAlignment, "a staged read"), copy.file->nbytes());
    copy.file->read(begin, buffer.memory->data(), end - begin, options_.prefers_direct);
    copy.file->verify_opened(wanted);  // after the read: it may have changed meanwhile
    return skipped;
}

void StagingRing::finish_chunk(const Chunk& chunk, std::exception_ptr failure) {
    StagedTransfer& transfer = *chunk.transfer;
    const std::lock_guard lock(transfer.mutex_);
    if (failure && !transfer.failure_) {
        transfer.failure_ = std::move(failure);
    }
    if (transfer.num_remaining_ == 1) {
        try {
            transfer.done_->record(transfer.stream_);
        } catch (...) {
            transfer.failure_ = std::current_exception();
        }
    }
    // Counted down only after the fence is recorded: a consumer that saw zero before would wait
    // for the fence's previous record and read old bytes.
    if (--transfer.num_remaining_ == 0) {
        transfer.completed_.notify_all();
    }
}

}  // namespace exeunt::native
