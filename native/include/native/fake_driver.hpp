#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "native/driver.hpp"

namespace exeunt::native {

struct FakeOptions {
    std::size_t total_bytes = std::size_t{1} << 30;
    std::size_t granularity = std::size_t{64} << 10;
    std::uint64_t seed = 0;
    /// Work waits until `advance`, `run_all` or a synchronising call; else it runs when enqueued.
    bool is_delayed = false;
    bool has_virtual_memory = true;
    bool has_host_registration = true;
    bool has_read_only_registration = true;
    /// Virtual time of a copy, for event timings.
    double copy_bytes_per_ms = 50e6;
};

/// A CUDA driver in host memory, for machines without one.
///
/// Device memory is one memory file, so contents belong to an allocation and not to the address at
/// which it is mapped, and touching an unmapped address faults. Streams are queues whose heads run
/// in an order drawn from the seed, each as late as the option says; copies read their source
/// when they run, as a DMA engine would, unless the source is pageable. What correct use never
/// does (an unmap under pending work, the use of a stream that is gone) is written down in
/// `violations()`.
class FakeDriver final : public Driver {
  public:
    explicit FakeDriver(const FakeOptions& options);
    ~FakeDriver() override;
    FakeDriver(const FakeDriver&) = delete;
    FakeDriver& operator=(const FakeDriver&) = delete;

    [[nodiscard]] bool is_fake() const noexcept override { return true; }

    /// Runs one runnable operation, drawn at random. False when none is runnable.
    bool advance();
    /// Runs until nothing is runnable; returns how many operations ran.
    std::size_t run_all();
    void set_delayed(bool is_delayed);
    /// Enqueues work that takes `milliseconds` of virtual time and touches nothing.
    Status launch(cuda::Stream stream, double milliseconds);
    [[nodiscard]] std::size_t num_pending() const;
    /// Uses that a real device would punish with corruption or a fault.
    [[nodiscard]] std::vector<std::string> violations() const;
    /// Live driver-side objects and bytes by name; all zero once everything is given back.
    [[nodiscard]] std::vector<std::pair<std::string, std::size_t>> driver_objects() const;

    Status init() override;
    Status driver_version(int* version) override;
    Status device_count(int* count) override;
    Status device_name(char* name, int capacity, int ordinal) override;
    Status device_attribute(int* value, cuda::Attribute attribute, int ordinal) override;
    Status primary_context_retain(cuda::Context* context, int ordinal) override;
    Status primary_context_release(int ordinal) override;
    Status context_current(cuda::Context* context) override;
    Status context_push(cuda::Context context) override;
    Status context_pop(cuda::Context* context) override;
    Status context_synchronize() override;
    Status memory_info(std::size_t* free_bytes, std::size_t* total_bytes) override;
    Status granularity(std::size_t* nbytes, const cuda::AllocationProp& prop) override;
    Status address_reserve(cuda::DevicePtr* base, std::size_t nbytes) override;
    Status address_free(cuda::DevicePtr base, std::size_t nbytes) override;
    Status memory_create(cuda::AllocationHandle* handle, std::size_t nbytes,
                         const cuda::AllocationProp& prop) override;
    Status memory_release(cuda::AllocationHandle handle) override;
    Status memory_map(cuda::DevicePtr address, std::size_t nbytes,
                      cuda::AllocationHandle handle) override;
    Status memory_unmap(cuda::DevicePtr address, std::size_t nbytes) override;
    Status memory_set_access(cuda::DevicePtr address, std::size_t nbytes,
                             const cuda::AccessDesc& access) override;
    Status host_register(void* address, std::size_t nbytes, unsigned flags) override;
    Status host_unregister(void* address) override;
    Status host_alloc(void** address, std::size_t nbytes) override;
    Status host_free(void* address) override;
    Status copy_to_device(cuda::DevicePtr target, const void* source, std::size_t nbytes,
                          cuda::Stream stream) override;
    Status copy_to_host(void* target, cuda::DevicePtr source, std::size_t nbytes,
                        cuda::Stream stream) override;
    Status stream_create(cuda::Stream* stream) override;
    Status stream_destroy(cuda::Stream stream) override;
    Status stream_synchronize(cuda::Stream stream) override;
    Status stream_wait_event(cuda::Stream stream, cuda::Event event) override;
    Status event_create(cuda::Event* event, unsigned flags) override;
    Status event_destroy(cuda::Event event) override;
    Status event_record(cuda::Event event, cuda::Stream stream) override;
    Status event_query(cuda::Event event) override;
    Status event_synchronize(cuda::Event event) override;
    Status event_elapsed_ms(float* elapsed, cuda::Event begin, cuda::Event end) override;

  private:
    struct FakeEvent {
        std::uint64_t recorded = 0;   // records enqueued
        std::uint64_t completed = 0;  // the latest of them that has run
        double time_ms = 0;
        bool has_timing = true;
    };
    enum class OperationKind { kCopyIn, kCopyOut, kRecord, kWait, kLaunch };
    struct Operation {
        OperationKind kind = OperationKind::kLaunch;
        std::uint64_t device = 0;  // device address of a copy
        std::uint64_t host = 0;    // host address of a copy
        std::size_t nbytes = 0;
        std::vector<std::byte> staged;  // a pageable source's bytes, read when enqueued
        std::shared_ptr<FakeEvent> event;
        std::uint64_t version = 0;
        double milliseconds = 0;
    };
    struct Queue {
        std::deque<Operation> operations;
        double clock_ms = 0;
    };
    struct Physical {
        std::size_t nbytes = 0;
        std::size_t file_offset = 0;
        std::size_t num_mappings = 0;
        bool is_released = false;
    };
    struct MappedRange {
        std::size_t nbytes = 0;
        cuda::AllocationHandle handle = 0;
        bool is_accessible = false;
    };
    enum class HostKind { kRegistered, kAllocated };
    struct HostRange {
        std::size_t nbytes = 0;
        HostKind kind = HostKind::kRegistered;
    };
    enum class Pinning { kPinned, kPageable, kMixed };

    // All of these expect mutex_ held.
    bool advance_locked();
    void enqueue_locked(Queue& queue, Operation operation);
    [[nodiscard]] static bool is_runnable(const Queue& queue);
    void run(Queue& queue);
    bool run_until(const FakeEvent& event, std::uint64_t version);
    [[nodiscard]] bool is_accessible(std::uint64_t address, std::size_t nbytes) const;
    [[nodiscard]] Pinning pinning(std::uint64_t address, std::size_t nbytes) const;
    [[nodiscard]] bool has_pending_device(std::uint64_t address, std::size_t nbytes) const;
    [[nodiscard]] bool has_pending_host(std::uint64_t address, std::size_t nbytes) const;
    [[nodiscard]] bool is_reserved(std::uint64_t address, std::size_t nbytes) const;
    void forget_if_unused(cuda::AllocationHandle handle);
    Queue* find_queue(cuda::Stream stream);
    std::shared_ptr<FakeEvent> find_event(cuda::Event event);
    Status release_host(void* address, HostKind kind);

    const FakeOptions options_;
    const int memory_file_;
    mutable std::mutex mutex_;  // guards everything below
    std::mt19937_64 random_;
    bool is_delayed_;
    std::uint64_t next_id_ = 1;
    std::size_t next_file_offset_ = 0;
    std::size_t used_bytes_ = 0;
    std::size_t num_contexts_ = 0;
    std::map<std::uint64_t, std::size_t> reservations_;
    std::map<cuda::AllocationHandle, Physical> allocations_;
    std::map<std::uint64_t, MappedRange> mappings_;
    std::map<std::uint64_t, HostRange> host_ranges_;
    std::map<std::uint64_t, Queue> queues_;
    std::map<std::uint64_t, std::shared_ptr<FakeEvent>> events_;
    std::vector<std::string> violations_;
};

}  // namespace exeunt::native
