#include <fcntl.h>
#include <sys/stat.h>

#include "rig.hpp"

using namespace exeunt::test;

namespace {

constexpr std::size_t kHostPage = 4096;

}  // namespace

TEST("a file is registered in windows under the limit of pinned bytes") {
    Rig rig;
    rig.host_budget = std::make_shared<Budget>(10 * kHostPage);
    const WeightFile file(100'001);
    const auto source = rig.open(file.path);
    const TierResult result = source->register_pages(0, 100'001, 4 * kHostPage);
    CHECK(result.outcome == TierOutcome::kLimit);
    CHECK_EQUAL(result.held_bytes, 8 * kHostPage);
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 8 * kHostPage);
    source->release();
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 0U);
}

TEST("registering a stretch again, or one that overlaps it, only adds what is missing") {
    Rig rig;
    const WeightFile file(20 * kHostPage + 5);
    const auto source = rig.open(file.path);
    CHECK_EQUAL(source->register_pages(5000, 6000, 64 * kHostPage).held_bytes, 6000U);
    CHECK_EQUAL(source->registered_bytes(), 2 * kHostPage);
    const TierResult all = source->register_pages(0, file.bytes.size(), 64 * kHostPage);
    CHECK(all.outcome == TierOutcome::kComplete);
    CHECK_EQUAL(all.held_bytes, file.bytes.size());
    CHECK_EQUAL(source->registered_bytes(), file.bytes.size());
    CHECK_EQUAL(source->register_pages(0, 1, 64 * kHostPage).held_bytes, 1U);
}

TEST("a refused registration is a result, and the next call is not disturbed by it") {
    Rig rig;
    const WeightFile file(10 * kHostPage);
    const auto source = rig.open(file.path);
    // cuCtxGetCurrent, cuCtxPushCurrent, then cuMemHostRegister
    rig.driver->inject_fault(3, cuda::Status::kOutOfMemory);
    const TierResult refused = source->register_pages(0, 10 * kHostPage, kHostPage);
    CHECK(rig.driver->fault_was_delivered());
    CHECK(refused.outcome == TierOutcome::kRefused);
    CHECK(refused.status == cuda::Status::kOutOfMemory);
    CHECK_EQUAL(refused.held_bytes, 0U);
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 0U);
    CHECK(source->register_pages(0, 10 * kHostPage, kHostPage).outcome == TierOutcome::kComplete);
}

TEST("a device without read-only registration says so and slabs take over") {
    FakeOptions options;
    options.has_read_only_registration = false;
    Rig rig(options);
    const WeightFile file(10'000);
    const auto source = rig.open(file.path);
    CHECK(source->register_pages(0, 10'000, 1 << 20).outcome == TierOutcome::kUnsupported);
    const TierResult slab = source->load_slab(100, 5000);
    CHECK(slab.outcome == TierOutcome::kComplete);
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 5000U);
    CHECK_THROWS(StateError, (void)source->load_slab(5099, 10));
    CHECK_EQUAL(rig.host_budget->snapshot().used_bytes, 5000U);
}

TEST("pieces cover a range exactly, each in one tier") {
    Rig rig;
    const WeightFile file(40'000);
    const auto source = rig.open(file.path);
    (void)source->load_slab(10'000, 5000);
    (void)source->register_pages(8000, 20'000, 2 * kHostPage);
    std::size_t offset = 1;
    for (const HostPiece& piece : source->pieces(1, 39'998, HostTier::kStaged)) {
        CHECK_EQUAL(piece.file_offset, offset);
        CHECK(std::equal(piece.address, piece.address + piece.nbytes,
                         reinterpret_cast<const std::byte*>(file.bytes.data()) + offset));
        if (piece.tier == HostTier::kSlab) {
            CHECK_EQUAL(piece.file_offset, 10'000U);
            CHECK_EQUAL(piece.nbytes, 5000U);
        }
        offset += piece.nbytes;
    }
    CHECK_EQUAL(offset, 39'999U);
}

TEST("a page that a slab holds in its middle is not registered") {
    Rig rig;
    const WeightFile file(10 * kHostPage);
    const auto source = rig.open(file.path);
    (void)source->load_slab(5000, 2000);
    const TierResult result = source->register_pages(7000, 8000, std::size_t{1} << 20);
    CHECK_EQUAL(result.held_bytes, 15'000 - 2 * kHostPage);
    const auto pieces = source->pieces(5000, 10'000, HostTier::kPageable);
    CHECK_EQUAL(pieces.size(), 3U);
    CHECK(pieces[0].tier == HostTier::kSlab && pieces[0].nbytes == 2000);
    CHECK(pieces[1].tier == HostTier::kPageable && pieces[1].nbytes == 2 * kHostPage - 7000);
    CHECK(pieces[2].tier == HostTier::kRegistered &&
          pieces[2].address == source->file()->data() + 2 * kHostPage);
}

TEST("a file that was replaced, touched or cut is refused") {
    Rig rig;
    const WeightFile file(10'000);
    const auto source = rig.open(file.path);
    const FileMapping& mapping = *source->file();
    mapping.verify();
    const timespec touched[2] = {{1, 0}, {1, 0}};
    CHECK(utimensat(AT_FDCWD, file.path.c_str(), touched, 0) == 0);
    CHECK_THROWS(FileChanged, mapping.verify());
    CHECK_THROWS(FileChanged, (void)source->register_pages(0, 1, kHostPage));
    CHECK_THROWS(FileChanged, (void)source->load_slab(0, 1));

    const WeightFile cut(10'000);
    const FileMapping short_mapping(cut.path);
    CHECK(truncate(cut.path.c_str(), 5000) == 0);
    CHECK_THROWS(FileChanged, short_mapping.verify());
    std::vector<std::byte> bytes(10'000);
    CHECK_THROWS(FileChanged, short_mapping.read(0, bytes.data(), bytes.size(), false));

    const WeightFile gone(100);
    const FileMapping gone_mapping(gone.path);
    CHECK(unlink(gone.path.c_str()) == 0);
    CHECK_THROWS(FileChanged, gone_mapping.verify());
}

TEST("a mapping serves one source, which knows of all that is pinned of it") {
    Rig rig;
    const WeightFile file(10'000);
    const auto mapping = std::make_shared<FileMapping>(file.path);
    auto source = std::make_shared<HostSource>(rig.device, rig.host_budget, mapping);
    CHECK_THROWS(StateError, HostSource(rig.device, rig.host_budget, mapping));
    source.reset();
    CHECK_THROWS(StateError, HostSource(rig.device, rig.host_budget, mapping));
}

TEST("files that are none are refused") {
    CHECK_THROWS(FileError, FileMapping("/nonexistent/weights"));
    CHECK_THROWS(SizeError, FileMapping("/dev/null"));
    CHECK_THROWS(SizeError, FileMapping("/tmp"));
    const WeightFile empty(0);
    CHECK_THROWS(SizeError, FileMapping(empty.path));
}

TEST("hostile ranges of a file are refused") {
    Rig rig;
    const WeightFile file(10'000);
    const auto source = rig.open(file.path);
    const std::size_t huge = std::size_t{1} << 63;
    CHECK_THROWS(SizeError, (void)source->register_pages(0, 0, kHostPage));
    CHECK_THROWS(SizeError, (void)source->register_pages(0, 10'001, kHostPage));
    CHECK_THROWS(SizeError, (void)source->register_pages(huge, huge, kHostPage));
    CHECK_THROWS(SizeError, (void)source->register_pages(0, 1, kHostPage - 1));
    CHECK_THROWS(SizeError, (void)source->load_slab(~std::size_t{0}, 2));
    CHECK_THROWS(SizeError, Unit({}));
    CHECK_THROWS(SizeError, Unit({{source, 9999, 2, 0}}));
    CHECK_THROWS(SizeError, Unit({{source, 0, 0, 0}}));
    CHECK_THROWS(SizeError, Unit({{source, 0, 10, ~std::size_t{0} - 5}}));
    CHECK_THROWS(SizeError, Unit({{source, 0, 10, 0}, {source, 50, 10, 9}}));
}

TEST("staging buffers count as pinned, and too many are refused") {
    Rig rig;
    rig.host_budget = std::make_shared<Budget>(3 * kHostPage);
    {
        const StagingRing ring(rig.device, rig.host_budget, {3, kHostPage, 1, false});
        CHECK_EQUAL(rig.host_budget->free_bytes(), 0U);
    }
    CHECK_EQUAL(rig.host_budget->free_bytes(), 3 * kHostPage);
    CHECK_THROWS(OutOfMemory, StagingRing(rig.device, rig.host_budget, {4, kHostPage, 1, false}));
    CHECK_EQUAL(rig.host_budget->free_bytes(), 3 * kHostPage);
    CHECK_THROWS(SizeError, StagingRing(rig.device, rig.host_budget, {1, 100, 1, false}));
    CHECK_THROWS(SizeError, StagingRing(rig.device, rig.host_budget, {1, kHostPage, 2, false}));
    CHECK_THROWS(SizeError, StagingRing(rig.device, rig.host_budget, {1, kHostPage, 0, false}));
}
