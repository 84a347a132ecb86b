// A CPU allocator that counts, and that refuses to pass a limit: what a small device would do, on a machine without one.
//
// Installed through c10::SetCPUAllocator, it sees every byte that PyTorch asks for, kernels' scratch space included. Each block
// has its size written in a header before it, so that freeing needs nothing else. Bound with ctypes: only c10 is needed to build it.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr size_t kHeader = 64;  // also the alignment that vectorised kernels expect

std::atomic<int64_t> live{0}, peak{0}, limit{-1};  // limit < 0: none

void give_back(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  live -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &give_back, cpu};
    const auto asked = static_cast<int64_t>(size);
    const int64_t now = live.fetch_add(asked) + asked;
    const int64_t most = limit;
    void* block = nullptr;
    const bool fits = most < 0 || now <= most;
    if (!fits || posix_memalign(&block, kHeader, size + kHeader) != 0) {
      live -= asked;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "counting allocator: ", asked, " bytes more than the ", now - asked,
                       " in use pass the limit of ", most);
    }
    for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
    }
    *static_cast<int64_t*>(block) = asked;
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &give_back, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

Counting counting;

}  // namespace

extern "C" {
void counting_install() { c10::SetCPUAllocator(&counting, /*priority=*/1); }
int64_t counting_live() { return live; }
int64_t counting_peak() { return peak; }
void counting_reset_peak() { peak = live.load(); }
void counting_set_limit(int64_t bytes) { limit = bytes; }
}
