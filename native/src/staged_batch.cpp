#include "native/staged_batch.hpp"

#include <cstdint>
#include <string>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

void refuse_empty(const std::byte* source, std::size_t nbytes, cuda::DevicePtr target) {
    if (nbytes == 0 || source == nullptr || target == 0) {
        throw SizeError("a copy of " + std::to_string(nbytes) +
                        " bytes has no bytes or no address; leave it out");
    }
    (void)checked_add(reinterpret_cast<std::uintptr_t>(source), nbytes, "a copy's source");
    (void)checked_add(target, nbytes, "a copy's target");
}

}  // namespace

StagedBatch::StagedBatch(std::shared_ptr<StagingRing> staging,
                         const std::vector<CopyBatch::Part>& direct,
                         const std::vector<Part>& staged)
    : staging_(std::move(staging)) {
    if (staged.empty()) {
        throw SizeError("a staged batch has 0 staged copies; take a CopyBatch");
    }
    auto plan = std::make_shared<CopyPlan>();
    for (const CopyBatch::Part& part : direct) {
        refuse_empty(part.source, part.nbytes, part.target);
        nbytes_ = checked_add(nbytes_, part.nbytes, "a batch");
        plan->direct.push_back({part.source, part.nbytes, part.target, nullptr, 0});
    }
    for (const Part& part : staged) {
        refuse_empty(part.file ? part.file->data() : part.source, part.nbytes, part.target);
        if (part.file && checked_add(part.file_offset, part.nbytes, "a staged copy's end") >
                             part.file->nbytes()) {
            throw SizeError("a staged copy ends at byte " +
                            std::to_string(part.file_offset + part.nbytes) + ", the file has " +
                            std::to_string(part.file->nbytes()) + " bytes: " + part.file->path());
        }
        nbytes_ = checked_add(nbytes_, part.nbytes, "a batch");
        staged_nbytes_ += part.nbytes;
        plan->staged.push_back(
            {part.source, part.nbytes, part.target, part.file, part.file ? part.file_offset : 0});
    }
    plan_ = std::move(plan);
}

std::shared_ptr<StagedTransfer> StagedBatch::submit(
    cuda::Stream stream, const std::vector<std::shared_ptr<EventFence>>& after,
    std::shared_ptr<EventFence> ready) const {
    const Device& device = ready->device();
    const ContextScope scope(device);
    for (const std::shared_ptr<EventFence>& fence : after) {
        fence->block_stream(stream);
    }
    try {
        enqueue_copies(device, plan_->direct, /*base=*/0, stream);
        return staging_->start(plan_, /*base=*/0, stream, ready);
    } catch (...) {
        try {
            ready->record(stream);  // behind the copies that are pending
        } catch (const CudaError&) {
            // The first failure tells more.
        }
        throw;
    }
}

}  // namespace exeunt::native
