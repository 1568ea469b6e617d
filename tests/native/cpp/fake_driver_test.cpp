#include "native/event_fence.hpp"
#include "rig.hpp"

// The fake driver must be as unforgiving as a GPU, or the suite on it proves nothing.

using namespace exeunt::test;

namespace {

struct Raw {
    explicit Raw(FakeOptions options = delayed()) : driver(options) {
        cuda::AllocationProp prop{};
        prop.type = cuda::kAllocationTypePinned;
        prop.location = {cuda::kLocationTypeDevice, 0};
        CHECK(driver.address_reserve(&base, kPage) == cuda::Status::kSuccess);
        CHECK(driver.memory_create(&handle, kPage, prop) == cuda::Status::kSuccess);
        CHECK(driver.memory_map(base, kPage, handle) == cuda::Status::kSuccess);
        const cuda::AccessDesc access{{cuda::kLocationTypeDevice, 0}, cuda::kAccessReadWrite};
        CHECK(driver.memory_set_access(base, kPage, access) == cuda::Status::kSuccess);
        CHECK(driver.stream_create(&stream) == cuda::Status::kSuccess);
    }
    FakeDriver driver;
    cuda::DevicePtr base = 0;
    cuda::AllocationHandle handle = 0;
    cuda::Stream stream = nullptr;
};

}  // namespace

TEST("the fake notices pages that are unmapped under a pending copy") {
    Raw raw;
    const std::vector<char> bytes(100, 'x');
    CHECK(raw.driver.copy_to_device(raw.base, bytes.data(), 100, raw.stream) ==
          cuda::Status::kSuccess);
    CHECK(raw.driver.memory_unmap(raw.base, kPage) == cuda::Status::kSuccess);
    CHECK_EQUAL(raw.driver.violations().size(), 1U);
    raw.driver.run_all();
    CHECK_EQUAL(raw.driver.violations().size(), 2U);
}

TEST("the fake notices a registration that ends under a pending copy") {
    Raw raw;
    std::vector<char> bytes(8192, 'x');
    CHECK(raw.driver.host_register(bytes.data(), bytes.size(), 0) == cuda::Status::kSuccess);
    CHECK(raw.driver.copy_to_device(raw.base, bytes.data(), 100, raw.stream) ==
          cuda::Status::kSuccess);
    CHECK(raw.driver.host_unregister(bytes.data()) == cuda::Status::kSuccess);
    CHECK_EQUAL(raw.driver.violations().size(), 1U);
}

TEST("a pinned source is read when the copy runs and a pageable one when it is enqueued") {
    Raw raw;
    std::vector<char> pinned(64, 'a');
    std::vector<char> pageable(64, 'a');
    CHECK(raw.driver.host_register(pinned.data(), 64, 0) == cuda::Status::kSuccess);
    CHECK(raw.driver.copy_to_device(raw.base, pinned.data(), 64, raw.stream) ==
          cuda::Status::kSuccess);
    CHECK(raw.driver.copy_to_device(raw.base + 64, pageable.data(), 64, raw.stream) ==
          cuda::Status::kSuccess);
    pinned.assign(64, 'b');
    pageable.assign(64, 'b');
    raw.driver.run_all();
    const auto* device = reinterpret_cast<const char*>(raw.base);
    CHECK_EQUAL(device[0], 'b');
    CHECK_EQUAL(device[64], 'a');
    CHECK(raw.driver.host_unregister(pinned.data()) == cuda::Status::kSuccess);
}

TEST("a copy whose source is registered in part is refused") {
    Raw raw;
    std::vector<char> bytes(128, 'x');
    CHECK(raw.driver.host_register(bytes.data(), 64, 0) == cuda::Status::kSuccess);
    CHECK(raw.driver.copy_to_device(raw.base, bytes.data(), 128, raw.stream) ==
          cuda::Status::kInvalidValue);
    CHECK(raw.driver.host_unregister(bytes.data()) == cuda::Status::kSuccess);
}

TEST("a stream waits for the record of an event that came before the wait, not a later one") {
    Raw raw;
    cuda::Stream other = nullptr;
    cuda::Event event = nullptr;
    CHECK(raw.driver.stream_create(&other) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_create(&event, cuda::kEventDefault) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_record(event, raw.stream) == cuda::Status::kSuccess);
    CHECK(raw.driver.stream_wait_event(other, event) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_query(event) == cuda::Status::kNotReady);
    CHECK(raw.driver.stream_synchronize(other) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_query(event) == cuda::Status::kSuccess);
}

TEST("virtual time of a wait is the later of the two streams") {
    Raw raw;
    cuda::Stream other = nullptr;
    cuda::Event begin = nullptr;
    cuda::Event middle = nullptr;
    cuda::Event end = nullptr;
    CHECK(raw.driver.stream_create(&other) == cuda::Status::kSuccess);
    for (cuda::Event* event : {&begin, &middle, &end}) {
        CHECK(raw.driver.event_create(event, cuda::kEventDefault) == cuda::Status::kSuccess);
    }
    CHECK(raw.driver.launch(raw.stream, 5.0) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_record(middle, raw.stream) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_record(begin, other) == cuda::Status::kSuccess);
    CHECK(raw.driver.launch(other, 2.0) == cuda::Status::kSuccess);
    CHECK(raw.driver.stream_wait_event(other, middle) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_record(end, other) == cuda::Status::kSuccess);
    raw.driver.run_all();
    float elapsed = 0;
    CHECK(raw.driver.event_elapsed_ms(&elapsed, begin, end) == cuda::Status::kSuccess);
    CHECK_EQUAL(elapsed, 5.0F);
}

TEST("the same seed gives the same order and another seed another one") {
    const auto order = [](std::uint64_t seed) {
        FakeDriver driver(delayed(seed));
        std::vector<cuda::Stream> streams(4);
        std::vector<cuda::Event> events(4);
        for (std::size_t index = 0; index < streams.size(); ++index) {
            CHECK(driver.stream_create(&streams[index]) == cuda::Status::kSuccess);
            CHECK(driver.event_create(&events[index], 0) == cuda::Status::kSuccess);
            CHECK(driver.event_record(events[index], streams[index]) == cuda::Status::kSuccess);
        }
        std::string text;
        while (driver.advance()) {
            for (const cuda::Event event : events) {
                text += driver.event_query(event) == cuda::Status::kSuccess ? '1' : '0';
            }
        }
        return text;
    };
    CHECK_EQUAL(order(1), order(1));
    bool differs = false;
    for (std::uint64_t seed = 2; seed < 12; ++seed) {
        differs = differs || order(seed) != order(1);
    }
    CHECK(differs);
}

TEST("a call that is to fail is not made and the next one is") {
    Raw raw;
    raw.driver.inject_fault(2, cuda::Status::kOutOfMemory);
    cuda::Event first = nullptr;
    cuda::Event second = nullptr;
    CHECK(raw.driver.event_create(&first, 0) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_create(&second, 0) == cuda::Status::kOutOfMemory);
    CHECK(second == nullptr);
    CHECK(raw.driver.fault_was_delivered());
    CHECK(raw.driver.event_create(&second, 0) == cuda::Status::kSuccess);
}

TEST("the fake notices the use of a stream that is gone") {
    Raw raw;
    cuda::Event event = nullptr;
    CHECK(raw.driver.event_create(&event, 0) == cuda::Status::kSuccess);
    CHECK(raw.driver.stream_destroy(raw.stream) == cuda::Status::kSuccess);
    CHECK(raw.driver.event_record(event, raw.stream) == cuda::Status::kInvalidHandle);
    CHECK_EQUAL(raw.driver.violations().size(), 1U);
}
