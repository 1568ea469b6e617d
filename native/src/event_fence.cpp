#include "native/event_fence.hpp"

#include <utility>

#include "native/error.hpp"

namespace exeunt::native {

EventFence::EventFence(std::shared_ptr<Device> device, Timing timing) : device_(std::move(device)) {
    const ContextScope scope(*device_);
    check(
        device_->driver().event_create(
            &handle_, timing == Timing::kEnabled ? cuda::kEventDefault : cuda::kEventDisableTiming),
        "cuEventCreate");
}

EventFence::~EventFence() {
    release_quietly(*device_, "cuEventDestroy", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.event_destroy(handle_);
    });
}

void EventFence::record(cuda::Stream stream) {
    const ContextScope scope(*device_);
    check(device_->driver().event_record(handle_, stream), "cuEventRecord");
}

bool EventFence::is_complete() const {
    const ContextScope scope(*device_);
    const cuda::Status status = device_->driver().event_query(handle_);
    if (status == cuda::Status::kNotReady) {
        return false;
    }
    check(status, "cuEventQuery");
    return true;
}

bool EventFence::is_surely_complete() const noexcept {
    try {
        return is_complete();
    } catch (const Error&) {
        return false;
    }
}

void EventFence::block_stream(cuda::Stream stream) const {
    const ContextScope scope(*device_);
    check(device_->driver().stream_wait_event(stream, handle_), "cuStreamWaitEvent");
}

void EventFence::synchronize() const {
    const ContextScope scope(*device_);
    check(device_->driver().event_synchronize(handle_), "cuEventSynchronize");
}

void EventFence::synchronize_quietly() const noexcept {
    release_quietly(*device_, "cuEventSynchronize", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.event_synchronize(handle_);
    });
}

double EventFence::elapsed_ms_since(const EventFence& begin) const {
    const ContextScope scope(*device_);
    float elapsed = 0;
    check(device_->driver().event_elapsed_ms(&elapsed, begin.handle_, handle_),
          "cuEventElapsedTime");
    return elapsed;
}

}  // namespace exeunt::native
