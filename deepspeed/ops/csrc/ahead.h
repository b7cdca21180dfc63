// Memory that is fetched before it is needed, a line at a time, while others are computed with.
//
// Processors fetch ahead themselves, but stop at the end of a page, which is all that a tile of float32 is.
#pragma once

#include <cstdint>

namespace ahead {

constexpr int line = 16;  // elements after which the next fetches are due: float32 of a line of the cache

class Streams {
  public:
    // From `at` on lie elements of `bytes` each, which are needed after those that are computed with.
    void add(const void* at, int64_t bytes) { streams_[count_++] = {static_cast<const char*>(at), bytes}; }

    // Element `i` of every stream. Nothing has to be there: what lies outside of memory is not fetched.
    void fetch(int i) const {
        for (int k = 0; k < count_; k++) __builtin_prefetch(streams_[k].at + i * streams_[k].bytes, 1);
    }

  private:
    struct Stream {
        const char* at;
        int64_t bytes;
    };

    Stream streams_[5];
    int count_ = 0;
};

}  // namespace ahead
