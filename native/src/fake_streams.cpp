#include <algorithm>
#include <cstring>

#include "fake_call.hpp"
#include "native/fake_driver.hpp"

// Streams and events of the fake driver. Memory is in fake_driver.cpp.

namespace exeunt::native {

using cuda::Status;

namespace {

constexpr double kCopyLatencyMs = 0.004;

}  // namespace

bool FakeDriver::is_runnable(const Queue& queue) {
    if (queue.operations.empty()) {
        return false;
    }
    const Operation& head = queue.operations.front();
    return head.kind != OperationKind::kWait || head.event->completed >= head.version;
}

bool FakeDriver::is_accessible(std::uint64_t address, std::size_t nbytes) const {
    while (nbytes > 0) {
        auto found = mappings_.upper_bound(address);
        if (found == mappings_.begin()) {
            return false;
        }
        --found;
        const std::uint64_t end = found->first + found->second.nbytes;
        if (address >= end || !found->second.is_accessible) {
            return false;
        }
        const std::size_t covered = std::min<std::size_t>(nbytes, end - address);
        address += covered;
        nbytes -= covered;
    }
    return true;
}

FakeDriver::Pinning FakeDriver::pinning(std::uint64_t address, std::size_t nbytes) const {
    for (const auto& [begin, range] : host_ranges_) {
        if (address >= begin && address + nbytes <= begin + range.nbytes) {
            return Pinning::kPinned;
        }
        if (overlap(begin, range.nbytes, address, nbytes)) {
            return Pinning::kMixed;
        }
    }
    return Pinning::kPageable;
}

bool FakeDriver::has_pending_device(std::uint64_t address, std::size_t nbytes) const {
    return std::ranges::any_of(queues_, [&](const auto& item) {
        return std::ranges::any_of(item.second.operations, [&](const Operation& operation) {
            return operation.nbytes > 0 &&
                   overlap(operation.device, operation.nbytes, address, nbytes);
        });
    });
}

bool FakeDriver::has_pending_host(std::uint64_t address, std::size_t nbytes) const {
    return std::ranges::any_of(queues_, [&](const auto& item) {
        return std::ranges::any_of(item.second.operations, [&](const Operation& operation) {
            return operation.nbytes > 0 && operation.staged.empty() &&
                   overlap(operation.host, operation.nbytes, address, nbytes);
        });
    });
}

void FakeDriver::run(Queue& queue) {
    const Operation operation = std::move(queue.operations.front());
    queue.operations.pop_front();
    queue.clock_ms += operation.milliseconds;
    switch (operation.kind) {
        case OperationKind::kCopyIn:
        case OperationKind::kCopyOut: {
            if (!is_accessible(operation.device, operation.nbytes)) {
                violations_.emplace_back("copy touched unmapped device memory");
                break;
            }
            if (operation.staged.empty() &&
                pinning(operation.host, operation.nbytes) != Pinning::kPinned) {
                violations_.emplace_back("copy touched host memory that is no longer pinned");
                break;
            }
            auto* device = reinterpret_cast<void*>(operation.device);
            auto* host = reinterpret_cast<void*>(operation.host);
            if (operation.kind == OperationKind::kCopyOut) {
                std::memcpy(host, device, operation.nbytes);
            } else {
                std::memcpy(device, operation.staged.empty() ? host : operation.staged.data(),
                            operation.nbytes);
            }
            break;
        }
        case OperationKind::kRecord:
            operation.event->completed = std::max(operation.event->completed, operation.version);
            operation.event->time_ms = queue.clock_ms;
            break;
        case OperationKind::kWait:
            if (operation.version > 0) {
                queue.clock_ms = std::max(queue.clock_ms, operation.event->time_ms);
            }
            break;
        case OperationKind::kLaunch:
            break;
    }
}

bool FakeDriver::advance_locked() {
    std::vector<Queue*> runnable;
    for (auto& [id, queue] : queues_) {
        if (is_runnable(queue)) {
            runnable.push_back(&queue);
        }
    }
    if (runnable.empty()) {
        return false;
    }
    run(*runnable[random_() % runnable.size()]);
    return true;
}

bool FakeDriver::advance() {
    const std::lock_guard lock(mutex_);
    return advance_locked();
}

std::size_t FakeDriver::run_all() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    while (advance_locked()) {
        ++count;
    }
    return count;
}

void FakeDriver::set_delayed(bool is_delayed) {
    const std::lock_guard lock(mutex_);
    is_delayed_ = is_delayed;
    while (!is_delayed_ && advance_locked()) {
    }
}

std::size_t FakeDriver::num_pending() const {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [id, queue] : queues_) {
        count += queue.operations.size();
    }
    return count;
}

void FakeDriver::enqueue_locked(Queue& queue, Operation operation) {
    queue.operations.push_back(std::move(operation));
    while (!is_delayed_ && advance_locked()) {
    }
}

FakeDriver::Queue* FakeDriver::find_queue(cuda::Stream stream) {
    const auto found = queues_.find(reinterpret_cast<std::uint64_t>(stream));
    if (found == queues_.end()) {
        violations_.emplace_back("a call used a stream that is gone");  // a GPU's driver crashes
        return nullptr;
    }
    return &found->second;
}

std::shared_ptr<FakeDriver::FakeEvent> FakeDriver::find_event(cuda::Event event) {
    const auto found = events_.find(reinterpret_cast<std::uint64_t>(event));
    return found == events_.end() ? nullptr : found->second;
}

bool FakeDriver::run_until(const FakeEvent& event, std::uint64_t version) {
    while (event.completed < version) {
        if (!advance_locked()) {
            violations_.emplace_back("a synchronising call waits for ever");
            return false;
        }
    }
    return true;
}

Status FakeDriver::launch(cuda::Stream stream, double milliseconds) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    if (queue == nullptr) {
        return Status::kInvalidHandle;
    }
    Operation operation;
    operation.milliseconds = milliseconds;
    enqueue_locked(*queue, std::move(operation));
    return Status::kSuccess;
}

Status FakeDriver::context_synchronize() {
    EXEUNT_FAKE_CALL();
    while (advance_locked()) {
    }
    return Status::kSuccess;
}

Status FakeDriver::copy_to_device(cuda::DevicePtr target, const void* source, std::size_t nbytes,
                                  cuda::Stream stream) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    const auto host = reinterpret_cast<std::uint64_t>(source);
    const Pinning kind = pinning(host, nbytes);
    // The driver refuses a source that is registered in part or in two pieces.
    if (queue == nullptr || kind == Pinning::kMixed || !is_accessible(target, nbytes)) {
        return queue == nullptr ? Status::kInvalidHandle : Status::kInvalidValue;
    }
    Operation operation;
    operation.kind = OperationKind::kCopyIn;
    operation.device = target;
    operation.host = host;
    operation.nbytes = nbytes;
    operation.milliseconds =
        kCopyLatencyMs + static_cast<double>(nbytes) / options_.copy_bytes_per_ms;
    if (kind == Pinning::kPageable) {
        const auto* bytes = static_cast<const std::byte*>(source);
        operation.staged.assign(bytes, bytes + nbytes);
    }
    enqueue_locked(*queue, std::move(operation));
    return Status::kSuccess;
}

Status FakeDriver::copy_to_host(void* target, cuda::DevicePtr source, std::size_t nbytes,
                                cuda::Stream stream) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    const auto host = reinterpret_cast<std::uint64_t>(target);
    if (queue == nullptr) {
        return Status::kInvalidHandle;
    }
    if (pinning(host, nbytes) != Pinning::kPinned || !is_accessible(source, nbytes)) {
        return Status::kInvalidValue;
    }
    Operation operation;
    operation.kind = OperationKind::kCopyOut;
    operation.device = source;
    operation.host = host;
    operation.nbytes = nbytes;
    operation.milliseconds =
        kCopyLatencyMs + static_cast<double>(nbytes) / options_.copy_bytes_per_ms;
    enqueue_locked(*queue, std::move(operation));
    return Status::kSuccess;
}

Status FakeDriver::stream_create(cuda::Stream* stream) {
    EXEUNT_FAKE_CALL();
    const std::uint64_t id = next_id_++;
    queues_[id];
    *stream = reinterpret_cast<cuda::Stream>(id);
    return Status::kSuccess;
}

Status FakeDriver::stream_destroy(cuda::Stream stream) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    if (stream == nullptr || queue == nullptr) {
        return Status::kInvalidHandle;
    }
    // The real driver lets queued work finish after the handle has gone.
    while (!queue->operations.empty() && advance_locked()) {
    }
    queues_.erase(reinterpret_cast<std::uint64_t>(stream));
    return Status::kSuccess;
}

Status FakeDriver::stream_synchronize(cuda::Stream stream) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    if (queue == nullptr) {
        return Status::kInvalidHandle;
    }
    while (!queue->operations.empty()) {
        if (!advance_locked()) {
            violations_.emplace_back("a synchronising call waits for ever");
            return Status::kUnknown;
        }
    }
    return Status::kSuccess;
}

Status FakeDriver::stream_wait_event(cuda::Stream stream, cuda::Event event) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    std::shared_ptr<FakeEvent> found = find_event(event);
    if (queue == nullptr || found == nullptr) {
        return Status::kInvalidHandle;
    }
    Operation operation;
    operation.kind = OperationKind::kWait;
    operation.version = found->recorded;
    operation.event = std::move(found);
    enqueue_locked(*queue, std::move(operation));
    return Status::kSuccess;
}

Status FakeDriver::event_create(cuda::Event* event, unsigned flags) {
    EXEUNT_FAKE_CALL();
    const std::uint64_t id = next_id_++;
    auto created = std::make_shared<FakeEvent>();
    created->has_timing = (flags & cuda::kEventDisableTiming) == 0;
    events_[id] = std::move(created);
    *event = reinterpret_cast<cuda::Event>(id);
    return Status::kSuccess;
}

Status FakeDriver::event_destroy(cuda::Event event) {
    EXEUNT_FAKE_CALL();
    return events_.erase(reinterpret_cast<std::uint64_t>(event)) == 1 ? Status::kSuccess
                                                                      : Status::kInvalidHandle;
}

Status FakeDriver::event_record(cuda::Event event, cuda::Stream stream) {
    EXEUNT_FAKE_CALL();
    Queue* queue = find_queue(stream);
    std::shared_ptr<FakeEvent> found = find_event(event);
    if (queue == nullptr || found == nullptr) {
        return Status::kInvalidHandle;
    }
    Operation operation;
    operation.kind = OperationKind::kRecord;
    operation.version = ++found->recorded;
    operation.event = std::move(found);
    enqueue_locked(*queue, std::move(operation));
    return Status::kSuccess;
}

Status FakeDriver::event_query(cuda::Event event) {
    EXEUNT_FAKE_CALL();
    const std::shared_ptr<FakeEvent> found = find_event(event);
    if (found == nullptr) {
        return Status::kInvalidHandle;
    }
    return found->completed >= found->recorded ? Status::kSuccess : Status::kNotReady;
}

Status FakeDriver::event_synchronize(cuda::Event event) {
    EXEUNT_FAKE_CALL();
    const std::shared_ptr<FakeEvent> found = find_event(event);
    if (found == nullptr) {
        return Status::kInvalidHandle;
    }
    return run_until(*found, found->recorded) ? Status::kSuccess : Status::kUnknown;
}

Status FakeDriver::event_elapsed_ms(float* elapsed, cuda::Event begin, cuda::Event end) {
    EXEUNT_FAKE_CALL();
    const std::shared_ptr<FakeEvent> first = find_event(begin);
    const std::shared_ptr<FakeEvent> last = find_event(end);
    if (first == nullptr || last == nullptr || !first->has_timing || !last->has_timing) {
        return Status::kInvalidHandle;
    }
    if (first->completed < first->recorded || last->completed < last->recorded) {
        return Status::kNotReady;
    }
    *elapsed = static_cast<float>(last->time_ms - first->time_ms);
    return Status::kSuccess;
}

}  // namespace exeunt::native
