// A recorded computation that runs again by one call from Python: operations of torch and kernels of
// ours, in the order in which they were seen, over numbered places for tensors.
//
//     places      [ input_ids | positions | ... | weight | weight | ... | x | x' | ... ]
//                   inputs, given anew            constants             results, let go after
//                                                                       their last use
//     calls       embedding(3, 0) -> 9      rms_norm(9, 4) in place 10      add(9, 12) -> 13 ...
//
// Run by TorchScript's calling convention, which lets go of Python's lock: other threads of the
// process go on meanwhile, and none of a step's hundreds of calls waits for them.

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using Places = std::vector<at::Tensor>;
using Numbers = std::vector<int64_t>;

constexpr int64_t NOBODY = -1;  // the place of a tensor that is not there

at::Tensor find(const Places& places, int64_t place) {
    return place == NOBODY ? at::Tensor() : places[place];
}

// One argument of an operation: a value, or where tensors stand.
struct Argument {
    c10::IValue value;
    Numbers places;
    bool is_tensor = false, is_list = false;

    c10::IValue read(const Places& all) const {
        if (is_list) return value_of_list(all);
        return is_tensor ? c10::IValue(find(all, places[0])) : value;
    }

private:
    c10::IValue value_of_list(const Places& all) const {
        auto list = c10::impl::GenericList(value.toList().elementType());
        for (int64_t place : places)
            list.push_back(place == NOBODY ? c10::IValue() : c10::IValue(all[place]));
        return list;
    }
};

struct Call {
    virtual ~Call() = default;
    virtual void run(Places& places) const = 0;
    Numbers unused;  // from here on

    void run_and_let_go(Places& places) const {
        run(places);
        for (int64_t place : unused) places[place].reset();
    }
};

struct Operation : Call {
    c10::OperatorHandle handle;
    std::vector<Argument> arguments;
    Numbers results;

    explicit Operation(c10::OperatorHandle found) : handle(std::move(found)) {
        for (const auto& argument : handle.schema().arguments()) {
            arguments.emplace_back();
            if (argument.default_value()) arguments.back().value = *argument.default_value();
        }
    }

    void run(Places& places) const override {
        std::vector<c10::IValue> stack;
        stack.reserve(arguments.size());
        for (const auto& argument : arguments) stack.push_back(argument.read(places));
        handle.callBoxed(stack);
        size_t next = 0;
        for (auto& result : stack) {
            if (result.isTensor())
                places[results.at(next++)] = std::move(result).toTensor();
            else
                for (const at::Tensor& tensor : result.toTensorVector())
                    places[results.at(next++)] = tensor;
        }
    }
};

// See arguments.h.
using Kernel = int (*)(void* const* tensors, const int64_t* sizes, const double* numbers);

struct KernelCall : Call {
    Kernel kernel;
    Numbers tensors, offsets;  // in bytes
    Numbers sizes;
    std::vector<double> numbers;

    void run(Places& places) const override {
        std::vector<void*> pointers;
        pointers.reserve(tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
            char* data = nullptr;
            if (tensors[i] != NOBODY)
                data = static_cast<char*>(places[tensors[i]].data_ptr()) + offsets[i];
            pointers.push_back(data);
        }
        TORCH_CHECK_WITH(OutOfMemoryError,
                         kernel(pointers.data(), sizes.data(), numbers.data()) == 0,
                         "a kernel found no memory for its sums");
    }
};

// Made in order: constants; then calls, each followed by its arguments; then run.
class Tape : public torch::CustomClassHolder {
public:
    explicit Tape(int64_t num_places) : places_(num_places) {}

    void set_constant(int64_t place, at::Tensor tensor) { places_.at(place) = std::move(tensor); }

    void add_operation(const std::string& name, const std::string& overload, Numbers results,
                       Numbers unused) {
        auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
        auto made = std::make_unique<Operation>(std::move(handle));
        made->results = std::move(results);
        made->unused = std::move(unused);
        open_ = made.get();
        calls_.push_back(std::move(made));
    }

    // Of the last operation; one that is not set has its default.
    void set_value(int64_t index, c10::IValue value) {
        const bool wants_tensor = type_of(index)->kind() == c10::TypeKind::TensorType;
        if (wants_tensor && value.isScalar())  // x * 2: torch wraps the 2
            value = at::native::wrapped_scalar_tensor(value.toScalar());
        open_->arguments.at(index).value = std::move(value);
    }

    void set_empty_list(int64_t index) {
        open_->arguments.at(index).value = c10::impl::GenericList(element_type(index));
    }

    void set_tensor(int64_t index, int64_t place) {
        Argument& argument = open_->arguments.at(index);
        argument.places = {place};
        argument.is_tensor = true;
    }

    void set_tensors(int64_t index, Numbers places) {
        set_empty_list(index);
        Argument& argument = open_->arguments.at(index);
        argument.places = std::move(places);
        argument.is_list = true;
    }

    void add_kernel(int64_t address, Numbers tensors, Numbers offsets, Numbers sizes,
                    std::vector<double> numbers, Numbers unused) {
        auto made = std::make_unique<KernelCall>();
        made->kernel = reinterpret_cast<Kernel>(address);
        made->tensors = std::move(tensors);
        made->offsets = std::move(offsets);
        made->sizes = std::move(sizes);
        made->numbers = std::move(numbers);
        made->unused = std::move(unused);
        calls_.push_back(std::move(made));
    }

    // Inputs stand in the first places. Returns what stands at `result` in the end.
    at::Tensor run(const std::vector<at::Tensor>& inputs, int64_t result) const {
        Places places = places_;
        std::copy(inputs.begin(), inputs.end(), places.begin());
        for (const auto& call : calls_) call->run_and_let_go(places);
        return places.at(result);
    }

private:
    // Of an argument of the last operation, which may be optional.
    c10::TypePtr type_of(int64_t index) const {
        c10::TypePtr type = open_->handle.schema().arguments().at(index).type();
        if (auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
        return type;
    }

    c10::TypePtr element_type(int64_t index) const {
        return type_of(index)->expectRef<c10::ListType>().getElementType();
    }

    Places places_;
    std::vector<std::unique_ptr<Call>> calls_;
    Operation* open_ = nullptr;
};

}  // namespace

TORCH_LIBRARY(chunkserve, library) {
    library.class_<Tape>("Tape")
        .def(torch::init<int64_t>())
        .def("set_constant", &Tape::set_constant)
        .def("add_operation", &Tape::add_operation)
        .def("set_value", &Tape::set_value)
        .def("set_empty_list", &Tape::set_empty_list)
        .def("set_tensor", &Tape::set_tensor)
        .def("set_tensors", &Tape::set_tensors)
        .def("add_kernel", &Tape::add_kernel)
        .def("run", [](const c10::intrusive_ptr<Tape>& self, std::vector<at::Tensor> inputs,
                       int64_t result) { return self->run(inputs, result); });
}
