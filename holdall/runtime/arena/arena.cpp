// An arena: one range of a device's memory in which every request of a planned step has its offset.
//
//   placement   which request of the step is this, and is its range free? Knows numbers only, no memory
//   arena       a placement over memory that was allocated once; what it cannot serve goes to torch's own allocator, and
//               everything where it has no memory: such a dry run only records a step
//   hook        torch asks its allocator for memory by the virtual function `allocate`. While a hook is on, the object has a
//               copy of its table of functions, in which that one is ours, and `raw_deleter`, which tells how a bare address is
//               freed; all others (statistics, limits, streams) stay torch's
//
// A request is recognised by its place in the sequence and its size. A range is given out only if nothing lies there, so a step
// that leaves the plan costs memory and never values. Memory is used again in the order of one stream: requests of others go to
// torch's allocator.
//
// The same code serves a CPU and a GPU. It is compiled against the headers of the torch that runs, without CUDA's.

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t OUTSIDE = -1;

// ---- placement

struct Planned {
  int64_t size, offset;
  bool brief;  // the workspace of an op: it may come in several requests, or not at all
};

class Placement {
 public:
  Placement(std::vector<Planned> planned, int64_t capacity, int64_t align)
      : capacity_(capacity), align_(align), planned_(std::move(planned)), used_(planned_.size()) {}

  // Begin a step.
  void restart() {
    next_ = 0;
    std::fill(used_.begin(), used_.end(), false);
    missed_.clear();
  }

  void replan(std::vector<Planned> planned) {
    planned_ = std::move(planned);
    used_.assign(planned_.size(), false);
    restart();
  }

  // The offset of a request, or OUTSIDE.
  int64_t take(int64_t nbytes) {
    const int64_t size = rounded(nbytes);
    const int64_t number = find(size);
    if (number < 0) {
      ++unknown;
      return OUTSIDE;
    }
    used_[number] = true;
    next_ = std::max(next_, number + 1);
    const int64_t low = planned_[number].offset;
    if (low < 0 || low + size > capacity_ || !is_free(low, low + size)) {
      ++occupied;
      return OUTSIDE;
    }
    live_[low] = low + size;
    ++placed;
    bytes += size;
    peak = std::max(peak, bytes);
    return low;
  }

  // The bytes that end with this; 0: nothing begins there.
  int64_t give(int64_t low) {
    auto found = live_.find(low);
    if (found == live_.end()) return 0;
    const int64_t size = found->second - low;
    live_.erase(found);
    bytes -= size;
    return size;
  }

  int64_t rounded(int64_t nbytes) const { return (nbytes + align_ - 1) / align_ * align_; }

  int64_t placed = 0, unknown = 0, occupied = 0, bytes = 0, peak = 0;

 private:
  static constexpr int64_t BEHIND = 8;  // an op may ask for its results in another order than it returns them
  static constexpr int64_t AHEAD = 32;  // requests that are left out
  static constexpr size_t ALIKE = 3;    // misses in a row that are enough to recognise another place of the step

  bool is_free(int64_t low, int64_t top) const {
    auto after = live_.lower_bound(low);
    if (after != live_.end() && after->first < top) return false;
    return after == live_.begin() || std::prev(after)->second <= low;
  }

  bool fits(int64_t number, int64_t size) const { return !used_[number] && planned_[number].size == size; }

  int64_t find(int64_t size) {
    const int64_t count = static_cast<int64_t>(planned_.size());
    if (next_ < count && fits(next_, size)) return found(next_);
    for (int64_t n = next_ - 1; n >= std::max<int64_t>(0, next_ - BEHIND); --n)
      if (!planned_[n].brief && fits(n, size)) return found(n);
    for (int64_t n = next_; n < std::min(count, next_ + AHEAD); ++n)
      if (fits(n, size)) return found(n);
    missed_.push_back(size);
    if (missed_.size() > ALIKE) missed_.erase(missed_.begin());
    return missed_.size() == ALIKE ? elsewhere(count) : -1;
  }

  int64_t found(int64_t number) {
    missed_.clear();
    return number;
  }

  // A place farther on, or else an earlier one (another forward of the same step), where the last misses are planned in a row.
  int64_t elsewhere(int64_t count) {
    const int64_t length = static_cast<int64_t>(ALIKE);
    for (int64_t k = 0; k + length <= count; ++k) {
      const int64_t begin = (next_ + k) % count;
      if (begin + length > count) continue;
      bool same = true;
      for (int64_t n = 0; n < length && same; ++n) same = planned_[begin + n].size == missed_[n];
      if (!same) continue;
      missed_.clear();
      const int64_t number = begin + length - 1;
      if (number < next_) {
        std::fill(used_.begin() + begin, used_.end(), false);
        next_ = number;
      }
      if (!used_[number]) return number;
    }
    return -1;
  }

  int64_t capacity_, align_, next_ = 0;
  std::vector<Planned> planned_;
  std::vector<bool> used_;
  std::vector<int64_t> missed_;
  std::map<int64_t, int64_t> live_;  // first byte -> last byte + 1
};

// ---- arena

using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
using RawDeleter = c10::DeleterFnPtr (*)(const c10::Allocator*);
using Fill = int (*)(void*, int, size_t, void*);  // cudaMemsetAsync

struct Event {
  int64_t key, size, offset;  // size OUTSIDE: a free
};

struct Arena;

struct Lease {  // one tensor's memory
  std::shared_ptr<Arena> arena;
  int64_t key = 0, offset = OUTSIDE;
  c10::DataPtr inner;  // torch's, of a request outside that is recorded
  std::vector<c10::Stream> used_on;
};

struct Arena {
  Arena(c10::Device device, c10::DataPtr memory, Placement placement, int64_t smallest)
      : device(device), memory(std::move(memory)), placement(std::move(placement)), smallest(smallest) {
    if (base() != nullptr) ++alive;
  }
  ~Arena() {
    if (base() != nullptr) --alive;
  }

  char* base() const { return static_cast<char*>(memory.get()); }

  void poison(int64_t low, int64_t size) const {
    if (!is_poisoned || base() == nullptr) return;
    if (device.is_cpu())
      std::memset(base() + low, 0xFF, size);
    else if (fill != nullptr)
      fill(base() + low, 0xFF, size, stream_handle);
  }

  static inline std::atomic<int64_t> alive{0};
  const c10::Device device;
  c10::DataPtr memory;
  Placement placement;
  const int64_t smallest;
  std::mutex mutex;
  std::atomic<bool> is_on{false};  // a step runs
  bool is_recording = false, is_poisoned = false;
  std::optional<c10::Stream> stream;
  Fill fill = nullptr;
  void* stream_handle = nullptr;
  int64_t keys = 0, outside = 0, waits = 0;
  std::atomic<int64_t> other_streams{0};  // requests; counted without the lock
  std::vector<Event> events;
};

// All that is leased, by address: of arenas that are no longer in use, too.
struct Leases {
  std::mutex mutex;
  std::unordered_map<void*, std::unique_ptr<Lease>> by_address;

  void put(void* address, std::unique_ptr<Lease> lease) {
    std::lock_guard<std::mutex> lock(mutex);
    by_address[address] = std::move(lease);
  }

  std::unique_ptr<Lease> take(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = by_address.find(address);
    if (found == by_address.end()) return nullptr;
    auto lease = std::move(found->second);
    by_address.erase(found);
    return lease;
  }
};

Leases& leases() {
  static Leases& all = *new Leases;  // never destroyed: tensors may be freed while the process ends
  return all;
}

void end(const std::unique_ptr<Lease>& lease) {
  Arena& arena = *lease->arena;
  c10::impl::VirtualGuardImpl guard(arena.device.type());
  for (const auto& stream : lease->used_on) {
    if (lease->inner.get() != nullptr)
      guard.recordDataPtrOnStream(lease->inner, stream);
    else
      guard.synchronizeStream(stream);
  }
  std::lock_guard<std::mutex> lock(arena.mutex);
  if (lease->offset != OUTSIDE) {
    const int64_t size = arena.placement.give(lease->offset);
    arena.poison(lease->offset, size);
    arena.waits += static_cast<int64_t>(lease->used_on.size());
  }
  if (arena.is_recording) arena.events.push_back({lease->key, OUTSIDE, lease->offset});
}

void release(void* address) {
  if (auto lease = leases().take(address)) end(lease);
}

// ---- hook

constexpr int BEFORE = 2, SLOTS = 256;  // words of a table before and after its address; torch's has about 60 functions

// The place of a virtual function in the table: a pointer to it is one more than its distance in bytes (Itanium C++ ABI).
template <typename Function>
int64_t slot_of(Function function) {
  static_assert(sizeof(function) == 2 * sizeof(int64_t));
  int64_t words[2];
  std::memcpy(words, &function, sizeof(words));
#if defined(__aarch64__)
  return words[0] / static_cast<int64_t>(sizeof(void*));  // there, the one is kept in the other word
#else
  return (words[0] - 1) / static_cast<int64_t>(sizeof(void*));
#endif
}

const int64_t ALLOCATE = slot_of(&c10::Allocator::allocate), RAW_DELETER = slot_of(&c10::Allocator::raw_deleter);

struct Hook {
  c10::Allocator* object = nullptr;
  bool is_on = false;      // the object has the copy
  void** table = nullptr;  // the object's own
  Allocate allocate = nullptr;
  RawDeleter raw_deleter = nullptr;
  void* copy[BEFORE + SLOTS] = {};
  std::shared_ptr<Arena> arena;
  std::mutex mutex;
  std::atomic<int64_t> seen{0};
};

Hook& hook_of(c10::DeviceType type) {
  static Hook* const both = new Hook[2];  // of the CPU and of CUDA devices; never destroyed, as above
  return both[type == c10::DeviceType::CPU ? 0 : 1];
}

c10::DataPtr serve(const std::shared_ptr<Arena>& arena, c10::Allocator* self, size_t nbytes) {
  const Allocate plainly = hook_of(arena->device.type()).allocate;
  const int64_t size = static_cast<int64_t>(nbytes);
  c10::impl::VirtualGuardImpl guard(arena->device.type());
  if (!arena->device.is_cpu()) {
    const c10::Device now = guard.getDevice();
    if (now != arena->device || guard.getStream(now) != *arena->stream) {
      ++arena->other_streams;
      return plainly(self, nbytes);
    }
  }
  auto lease = std::make_unique<Lease>();
  lease->arena = arena;
  {
    std::lock_guard<std::mutex> lock(arena->mutex);
    lease->key = arena->keys++;
    lease->offset = arena->placement.take(size);
    if (lease->offset != OUTSIDE && arena->base() != nullptr) {
      void* at = arena->base() + lease->offset;
      if (arena->is_recording) arena->events.push_back({lease->key, size, lease->offset});
      leases().put(at, std::move(lease));
      return {at, at, &release, arena->device};
    }
    arena->outside += size;
    if (!arena->is_recording) lease.reset();
  }
  c10::DataPtr found = plainly(self, nbytes);  // may collect garbage or raise: not under the lock
  if (!lease) return found;
  void* at = found.get();
  lease->inner = std::move(found);
  {
    std::lock_guard<std::mutex> lock(arena->mutex);
    arena->events.push_back({lease->key, size, lease->offset});
  }
  leases().put(at, std::move(lease));
  return {at, at, &release, arena->device};
}

template <c10::DeviceType TYPE>
c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
  Hook& on = hook_of(TYPE);
  on.seen.fetch_add(1, std::memory_order_relaxed);
  std::shared_ptr<Arena> arena;
  {
    std::lock_guard<std::mutex> lock(on.mutex);
    arena = on.arena;
  }
  if (!arena || !arena->is_on.load() || nbytes == 0 || static_cast<int64_t>(nbytes) < arena->smallest)
    return on.allocate(self, nbytes);
  return serve(arena, self, nbytes);
}

// Frees the address of a lease, and others as torch does.
template <c10::DeviceType TYPE>
void free_any(void* address) {
  const Hook& on = hook_of(TYPE);
  if (auto lease = leases().take(address))
    end(lease);
  else
    on.raw_deleter(on.object)(address);
}

template <c10::DeviceType TYPE>
c10::DeleterFnPtr raw_deleter(const c10::Allocator*) {
  return &free_any<TYPE>;
}

template <c10::DeviceType TYPE>
void replace_functions(Hook& on) {
  on.copy[BEFORE + ALLOCATE] = reinterpret_cast<void*>(&allocate<TYPE>);
  on.copy[BEFORE + RAW_DELETER] = reinterpret_cast<void*>(&raw_deleter<TYPE>);
}

c10::Allocator* allocator_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) {
    void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE") : nullptr;
    if (symbol != nullptr) return static_cast<std::atomic<c10::Allocator*>*>(symbol)->load();
  }
  return c10::GetAllocator(type);
}

// Is this function torch's? A table of another shape is then left alone.
bool is_torchs(void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return false;
  const std::string name = info.dli_fname;
  return name.find("libc10") != std::string::npos || name.find("libtorch") != std::string::npos;
}

using Handle = std::shared_ptr<Arena>;

std::vector<Planned> planned_of(int64_t count, const int64_t* sizes, const int64_t* offsets, const uint8_t* brief) {
  std::vector<Planned> planned(count);
  for (int64_t n = 0; n < count; ++n) planned[n] = {sizes[n], offsets[n], brief[n] != 0};
  return planned;
}

std::string& message() {
  static thread_local std::string text;
  return text;
}

}  // namespace

extern "C" {

const char* holdall_arena_message() { return message().c_str(); }

// Allocate an arena on a device. Null: it cannot be; `holdall_arena_message` says why. `dry`: without memory.
void* holdall_arena_make(int type, int index, int dry, int64_t capacity, int64_t align, int64_t smallest, int64_t count,
                         const int64_t* sizes, const int64_t* offsets, const uint8_t* brief) {
  try {
    const auto kind = static_cast<c10::DeviceType>(type);
    const c10::Device device(kind, kind == c10::DeviceType::CPU ? -1 : static_cast<c10::DeviceIndex>(index));
    c10::Allocator* torchs = allocator_of(kind);
    const Hook& on = hook_of(kind);
    const size_t size = dry ? 0 : static_cast<size_t>(capacity);
    c10::DataPtr memory = on.is_on ? on.allocate(torchs, size) : torchs->allocate(size);
    const int64_t at = reinterpret_cast<int64_t>(memory.get());
    if (at % align != 0) {
      message() = "the memory begins between two boundaries";
      return nullptr;
    }
    Placement placement(planned_of(count, sizes, offsets, brief), capacity, align);
    return new Handle(std::make_shared<Arena>(device, std::move(memory), std::move(placement), smallest));
  } catch (const std::exception& error) {
    message() = error.what();
    return nullptr;
  }
}

// Memory stays until its last tensor is gone.
void holdall_arena_drop(void* handle) { delete static_cast<Handle*>(handle); }

// Arenas whose memory is still there.
int64_t holdall_arena_alive() { return Arena::alive; }

void* holdall_arena_base(void* handle) { return (*static_cast<Handle*>(handle))->base(); }

void holdall_arena_replan(void* handle, int64_t count, const int64_t* sizes, const int64_t* offsets, const uint8_t* brief) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  arena.placement.replan(planned_of(count, sizes, offsets, brief));
}

// Fill freed memory with bytes of 0xFF, which are NaN. `fill`: cudaMemsetAsync, for a GPU, and the stream of the steps.
void holdall_arena_poison(void* handle, void* fill, void* stream) {
  Arena& arena = **static_cast<Handle*>(handle);
  arena.fill = reinterpret_cast<Fill>(fill);
  arena.stream_handle = stream;
  arena.is_poisoned = true;
}

// A step begins on the calling thread's current stream. `record`: write down its requests, those outside too, and all frees
// until the next step begins.
void holdall_arena_begin(void* handle, int record) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  if (!arena.device.is_cpu()) {
    c10::impl::VirtualGuardImpl guard(arena.device.type());
    arena.stream = guard.getStream(arena.device);
  }
  Placement& placement = arena.placement;
  placement.restart();
  placement.placed = placement.unknown = placement.occupied = 0;
  placement.peak = placement.bytes;
  arena.outside = arena.waits = 0;
  arena.other_streams = 0;
  arena.events.clear();
  arena.is_recording = record != 0;
  arena.is_on = true;
}

void holdall_arena_end(void* handle) {
  Arena& arena = **static_cast<Handle*>(handle);
  arena.is_on = false;
}

// Of the last step: placed, unknown, occupied, live bytes now, live bytes at most, bytes outside, other streams, waits.
void holdall_arena_counts(void* handle, int64_t* out) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  const Placement& placement = arena.placement;
  const int64_t found[] = {placement.placed, placement.unknown,  placement.occupied,  placement.bytes,
                           placement.peak,   arena.outside, arena.other_streams.load(), arena.waits};
  std::copy(std::begin(found), std::end(found), out);
}

// The events of the last recorded step, three numbers each; returns how many there are.
int64_t holdall_arena_recorded(void* handle, int64_t* out, int64_t most) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  const int64_t count = static_cast<int64_t>(arena.events.size());
  for (int64_t n = 0; n < std::min(count, most); ++n) {
    out[3 * n] = arena.events[n].key;
    out[3 * n + 1] = arena.events[n].size;
    out[3 * n + 2] = arena.events[n].offset;
  }
  return count;
}

// The placement alone, without a hook.
int64_t holdall_arena_take(void* handle, int64_t nbytes) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  return arena.placement.take(nbytes);
}

void holdall_arena_give(void* handle, int64_t offset) {
  Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  arena.poison(offset, arena.placement.give(offset));
}

// Another stream uses this memory. 1: it is the arena's, or recorded; 0: torch has to know.
int holdall_arena_used_on(void* handle, void* address, int64_t stream, int index) {
  const Arena& arena = **static_cast<Handle*>(handle);
  std::lock_guard<std::mutex> lock(leases().mutex);
  auto found = leases().by_address.find(address);
  if (found == leases().by_address.end()) return 0;
  found->second->used_on.push_back(c10::Stream::unpack3(stream, static_cast<c10::DeviceIndex>(index), arena.device.type()));
  return 1;
}

// Serve the device's requests of running steps from this arena. 0: done.
int holdall_arena_hook(void* handle) {
  const Handle& arena = *static_cast<Handle*>(handle);
  const c10::DeviceType type = arena->device.type();
  Hook& on = hook_of(type);
  std::lock_guard<std::mutex> lock(on.mutex);
  if (on.arena) {
    message() = "another arena is in use";
    return 1;
  }
  c10::Allocator* object = allocator_of(type);
  void*** place = reinterpret_cast<void***>(object);
  if (!on.is_on || object != on.object) {
    if (on.is_on || object == nullptr || !is_torchs((*place)[ALLOCATE]) || !is_torchs((*place)[RAW_DELETER])) {
      message() = "this version of torch has another allocator";
      return 1;
    }
    on.table = *place;
    on.allocate = reinterpret_cast<Allocate>(on.table[ALLOCATE]);
    on.raw_deleter = reinterpret_cast<RawDeleter>(on.table[RAW_DELETER]);
    std::memcpy(on.copy, on.table - BEFORE, sizeof(on.copy));
    type == c10::DeviceType::CPU ? replace_functions<c10::DeviceType::CPU>(on) : replace_functions<c10::DeviceType::CUDA>(on);
    on.object = object;
    on.is_on = true;
    __atomic_store_n(place, on.copy + BEFORE, __ATOMIC_SEQ_CST);
  }
  on.arena = arena;
  return 0;
}

// The functions stay ours while there are leases: a bare address may be freed later.
void holdall_arena_unhook(void* handle) {
  const Handle& arena = *static_cast<Handle*>(handle);
  Hook& on = hook_of(arena->device.type());
  std::lock_guard<std::mutex> lock(on.mutex);
  if (on.arena != arena) return;
  on.arena.reset();
  std::lock_guard<std::mutex> second(leases().mutex);
  if (!leases().by_address.empty()) return;
  __atomic_store_n(reinterpret_cast<void***>(on.object), on.table, __ATOMIC_SEQ_CST);
  on.is_on = false;
}

// Requests that came through the device's hook since the process began.
int64_t holdall_arena_seen(void* handle) {
  return hook_of((*static_cast<Handle*>(handle))->device.type()).seen.load();
}
}
