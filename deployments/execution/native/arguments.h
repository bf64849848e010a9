// How a kernel is called: one signature for all of them, so that a call can be kept as three lists and
// made again by somebody who knows nothing of the kernel.
//
//     int kernel(void* const* tensors, const int64_t* sizes, const double* numbers)
//
// It returns 0, or 1 where memory ran out: an exception must not leave C.

#pragma once

#include <cstdint>
#include <new>

namespace {

// What a kernel was given, taken in the order in which its caller lists it.
class Arguments {
public:
    Arguments(void* const* tensors, const int64_t* sizes, const double* numbers)
        : tensors_(tensors), sizes_(sizes), numbers_(numbers) {}

    // Null: the caller has none.
    template <typename T>
    T* tensor() {
        return static_cast<T*>(*tensors_++);
    }

    int64_t size() { return *sizes_++; }
    float number() { return static_cast<float>(*numbers_++); }

private:
    void* const* tensors_;
    const int64_t* sizes_;
    const double* numbers_;
};

template <typename Run>
int run_kernel(Run run, void* const* tensors, const int64_t* sizes, const double* numbers) {
    try {
        run(Arguments(tensors, sizes, numbers));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

}  // namespace

// Defines the kernel NAME, which a function of Arguments runs; its name may have commas.
#define DEFINE_KERNEL(NAME, ...)                                                                 \
    extern "C" int NAME(void* const* tensors, const int64_t* sizes, const double* numbers) {     \
        return run_kernel([](Arguments given) { __VA_ARGS__(given); }, tensors, sizes, numbers); \
    }
