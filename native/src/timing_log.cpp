#include "native/timing_log.hpp"

#include <utility>

namespace exeunt::native {

std::unique_ptr<TimingLog::Pair> TimingLog::begin(cuda::Stream stream) {
    if (interval_ == 0) {
        return nullptr;
    }
    // The first is measured, and then every interval-th.
    if (num_skipped_ > 0 && num_skipped_ < interval_) {
        ++num_skipped_;
        ++totals_.num_unmeasured;
        return nullptr;
    }
    num_skipped_ = 1;
    harvest();
    std::unique_ptr<Pair> pair;
    if (!spare_.empty()) {
        pair = std::move(spare_.back());
        spare_.pop_back();
    } else if (pending_.size() < capacity_) {
        pair = std::make_unique<Pair>(device_);
    } else {
        ++totals_.num_unmeasured;
        return nullptr;
    }
    try {
        pair->begin.record(stream);
    } catch (...) {
        spare_.push_back(std::move(pair));
        throw;
    }
    return pair;
}

void TimingLog::end(std::unique_ptr<Pair> pair, cuda::Stream stream, std::size_t nbytes) {
    if (pair == nullptr) {
        return;
    }
    pair->nbytes = nbytes;
    try {
        pair->end.record(stream);
    } catch (...) {
        spare_.push_back(std::move(pair));
        throw;
    }
    pending_.push_back(std::move(pair));
}

void TimingLog::harvest() {
    while (!pending_.empty() && pending_.front()->end.is_complete()) {
        const Pair& pair = *pending_.front();
        totals_.milliseconds += pair.end.elapsed_ms_since(pair.begin);
        totals_.nbytes += pair.nbytes;
        ++totals_.num_measured;
        spare_.push_back(std::move(pending_.front()));
        pending_.pop_front();
    }
}

}  // namespace exeunt::native
