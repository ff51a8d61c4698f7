---@meta
-- Declarations of what is written in C, for the editor (LuaLS) and for help(). The ops are declared by their table, see
-- tycho.meta; this file, io.lua and tokenizer.lua hold the rest.

---@alias Dtype "f64"|"f32"|"f16"|"bf16"|"i64"|"i32"|"i16"|"i8"|"u8"|"bool"|Quantized
---@alias Quantized "q8_0"|"q4_0"|"q2_k"|"q3_k"|"q4_k"|"q6_k"|"nf4"|"mxfp4"|"nvfp4"
---@alias Device "cpu"|"meta"|string

--- An n-dimensional array that counts from 0. x[i] selects, x["0:8, :, -1"] slices, x[mask] and x[positions] pick, and
--- a list of these goes dimension by dimension: x[{ 0, "2:4", positions }]. All also write, and writes into a tensor
--- that is no view are recorded for gradients. Tensors in a list select together, as in NumPy. Arithmetic works
--- elementwise with broadcasting, & | ~ << >> on integers and masks; comparison is by methods: x:lt(y).
---@class Tensor
---@field shape integer[] sizes of the dimensions: a list of Lua, which counts from 1; x:size(0) counts as tensors do
---@field dtype Dtype
---@field device Device
---@field ndim integer
---@field grad Tensor? what backward() has added up
---@field requires_grad boolean
---@field T Tensor the transpose of a matrix
---@field mT Tensor the last two dimensions swapped
---@field is_leaf boolean not computed from tensors that require gradients
---@field data Tensor the same memory outside the graph
---@field is_cuda boolean on a GPU
---@operator add(Tensor|number): Tensor
---@operator sub(Tensor|number): Tensor
---@operator mul(Tensor|number): Tensor
---@operator div(Tensor|number): Tensor
---@operator idiv(Tensor|number): Tensor
---@operator mod(Tensor|number): Tensor
---@operator pow(Tensor|number): Tensor
---@operator unm: Tensor
---@operator band(Tensor|integer|boolean): Tensor
---@operator bor(Tensor|integer|boolean): Tensor
---@operator bxor(Tensor|integer|boolean): Tensor
---@operator shl(Tensor|integer): Tensor
---@operator shr(Tensor|integer): Tensor
---@operator bnot: Tensor
---@operator len: integer
---@field [integer|string|Tensor|(integer|string|Tensor)[]] Tensor
local Tensor = {}

--- The only element, as a Lua number or boolean.
---@return number|boolean
function Tensor:item() end

--- The elements as nested Lua tables.
---@return table|number|boolean
function Tensor:tolist() end

--- The number of elements.
---@return integer
function Tensor:numel() end

--- Bytes of its elements; of block-quantized ones with their scales. On the meta device, what it would take.
---@return integer
function Tensor:nbytes() end

--- The size of one dimension, or all sizes.
---@param dim? integer
---@return integer ...
function Tensor:size(dim) end

--- The stride of one dimension in elements, or all strides.
---@param dim? integer
---@return integer ...
function Tensor:stride(dim) end

--- Whether the elements lie in memory in C order without gaps.
---@return boolean
function Tensor:is_contiguous() end

--- In another dtype or on another device: x:to("f16"), x:to("cpu"), x:to(other), x:to { dtype =, device = }. The tensor
--- itself when nothing changes. Recorded for gradients. With non_blocking = true a GPU copies from a tensor in pinned
--- memory while the host goes on: do not change that tensor before the copy is done (it may be released).
--- The block-quantized dtypes q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, mxfp4 (ggml's), nf4 and nvfp4 encode the rows of a
--- float tensor, whose last size must be a multiple of 32 (q8_0, q4_0, mxfp4), 256 (all of _k) or 64; a float dtype
--- decodes them again. Such tensors have views of whole rows, and serve as weights of linear and embedding.
---@param what Dtype|Device|Tensor|{dtype?: Dtype, device?: Device, non_blocking?: boolean}
---@param options? {non_blocking?: boolean}
---@return Tensor
function Tensor:to(what, options) end

--- A copy in page-locked memory of the CPU, the tensor itself when it is there already: GPUs copy from and to it by
--- themselves, see :to and :copy_ with non_blocking. Without history; an error without a GPU.
---@return Tensor
function Tensor:pin_memory() end

--- Whether the tensor lies in page-locked memory.
---@return boolean
function Tensor:is_pinned() end

--- A copy in memory that gives way when there is little, the tensor itself when it is there already: on a GPU unified
--- memory, whose pages the driver moves to the host and back; on the CPU a temporary file in $TMPDIR or /tmp, to which
--- the kernel writes pages. Without history; not counted among the CPU's live bytes.
---@return Tensor
function Tensor:page_memory() end

--- Whether the tensor lies in paged memory.
---@return boolean
function Tensor:is_paged() end

--- Tells the allocator that a stream uses this tensor besides the one that was current when it was made: once released,
--- its memory is not given out again before that stream has done what it was given until then. Returns the tensor.
---@param stream CudaStream
---@return Tensor
function Tensor:record_stream(stream) end

--- Releases the memory now. Using the tensor afterwards is an error. Also done by `local x <close>` and ty.scope.
function Tensor:free() end

--- Adds the gradient of this tensor to .grad of every leaf that requires one.
---@param gradient? Tensor of this tensor's shape; not needed for a tensor with one element
---@param options? {create_graph?: boolean, keep_graph?: boolean}
function Tensor:backward(gradient, options) end

--- Makes a leaf want a gradient (or no longer). Returns the tensor.
---@param on? boolean default true
---@return Tensor
function Tensor:requires_grad_(on) end

--- Keeps the gradient of a computed tensor in .grad at backward().
---@return Tensor
function Tensor:retain_grad() end

--- Sets or (nil) forgets .grad.
---@param gradient Tensor?
function Tensor:set_grad(gradient) end

--- Calls fn(gradient) when the gradient of this tensor is known; what it returns replaces it.
---@param fn fun(gradient: Tensor): Tensor?
---@return {remove: fun()} handle
function Tensor:register_hook(fn) end

---@class ty
local ty = {}

--- A tensor from a number or nested tables. Integers give i64, fractions f32, booleans bool, unless dtype says so.
---@param values number|boolean|table
---@param options? {dtype?: Dtype, device?: Device, requires_grad?: boolean}
---@return Tensor
function ty.tensor(values, options) end

--- Whether a value is a tensor.
---@param value any
---@return boolean
function ty.is_tensor(value) end

--- Whether tensors can be on a device here, and if not why: a line of text.
---@param name string "cpu", "cuda", "cuda:1" ...
---@return boolean available, string? why
function ty.device_available(name) end

--- What an error about an unknown name adds: "; did you mean softmax?", with up to three of the string keys of `table`
--- and of `names` that are nearest to `name`, or "" where none is near.
---@param name string
---@param table table
---@param names? string[]
---@return string
function ty.nearest(name, table, names) end

--- Gradients of outputs with respect to inputs, without touching .grad.
--- Options: grad_outputs (what to multiply outputs with), create_graph, keep_graph, allow_unused.
--- Of a function, whose result is one number: the function that gives its gradient to its argument number `inputs` (1),
--- ty.grad(fn)(x).
---@param outputs Tensor|Tensor[]|fun(...: any): Tensor
---@param inputs? Tensor|Tensor[]|integer
---@param options? table
---@return Tensor|(Tensor?)[]|fun(...: any): Tensor
function ty.grad(outputs, inputs, options) end

--- Runs fn(...) without recording for gradients and returns what it returns.
---@param fn function
---@return any ...
function ty.no_grad(fn, ...) end

--- Runs fn(...) with recording on and returns what it returns.
---@param fn function
---@return any ...
function ty.enable_grad(fn, ...) end

--- Turns recording on or off; returns what it was.
---@param on boolean
---@return boolean
function ty.set_grad_enabled(on) end

--- Whether what is computed is recorded for gradients.
---@return boolean
function ty.is_grad_enabled() end

--- Runs fn(...) with autocast and returns what it returns: products, convolutions and attention compute in that dtype,
--- exponentials, logarithms, reductions, softmax, norms and losses in f32, the rest in what they are given; f64 stays.
--- help() of an op says which it is. Weights are cast once while they do not change; gradients come in the parameters'
--- dtypes. Ops in place are left alone, and so is the backward pass, which computes as the forward pass did. f16
--- wants an optim.GradScaler besides. "f32" and `false`: without autocast. Micikevicius et al. 2018.
---@param dtype "bf16"|"f16"|"f32"|false
---@param fn function
---@return any ...
function ty.autocast(dtype, fn, ...) end

--- The dtype of the autocast that this runs under, or false.
---@return "bf16"|"f16"|false
function ty.autocast_dtype() end

--- Runs fn(...) with hooks on the tensors that ops keep for the backward pass: pack(tensor, op, what) gives what is
--- kept instead, unpack(kept) gives the tensor back. op: the name of the op that keeps the tensor; what: the name of
--- its argument, or "output".
---@param pack fun(tensor: Tensor, op: string, what: string): any
---@param unpack fun(kept: any): Tensor
---@param fn function
---@return any ...
function ty.saved_tensor_hooks(pack, unpack, fn, ...) end

--- Runs fn(...) and releases every tensor made meanwhile, except those it returns (also inside tables) or that ty.keep
--- took out. What it returns belongs to the scope around it, unless it was made outside.
---@param fn function
---@return any ...
function ty.scope(fn, ...) end

--- A scope for `local scope <close> = ty.open_scope()`: tensors made until the end of the block are released there.
function ty.open_scope() end

--- Takes tensors (also inside tables) out of the scopes. Returns its arguments.
---@return any ...
function ty.keep(...) end

--- Releases tensors now that the end of the innermost scope would release: those made in it, or returned to it. Others
--- (a parameter, what ty.keep took out, what belongs to a scope further out) stay.
---@param ... Tensor
function ty.discard(...) end

--- Starts the generator of random numbers from a seed. The same seed gives the same numbers on every device and for
--- every number of threads.
---@param seed integer
function ty.manual_seed(seed) end

--- The state of the generator of random numbers; with an argument: sets it.
---@param state? table
---@return table
function ty.rng_state(state) end

--- Sets the number of CPU threads. Results do not depend on it.
---@param count? integer 0: as many as the machine has
function ty.set_threads(count) end

--- The number of CPU threads.
---@return integer
function ty.threads() end

--- The instruction set of the kernels in use, what the CPU offers, and the number of threads.
---@return {isa: string, features: string[], threads: integer}
function ty.cpu() end

--- The table of ops: names, arguments with kinds and defaults, flags, documentation.
---@return table[]
function ty.ops() end

--- For ty.custom_op: gives outputs a node whose gradients backward(g1, ...) computes for the inputs.
---@param name string
---@param inputs Tensor[]
---@param outputs Tensor[]
---@param backward fun(...: Tensor?): Tensor? ...
function ty.record(name, inputs, outputs, backward) end

--- Drops the gradients of a list of leaves.
---@param list Tensor[]
function ty.clear_grads(list) end

--- What an optimizer asks at every step: grads[i], a tensor kept from call to call, becomes the gradient of list[i].
-- False when the list is not `known`, or when other leaves have gradients than those that have a tensor in grads (false
-- stands for the others).
---@param list Tensor[]
---@param known Tensor[]
---@param grads (Tensor|false)[]
---@return boolean
function ty.gather_grads(list, known, grads) end

--- Releases what the tensors of gather_grads hold, until it fills them again.
---@param grads (Tensor|false)[]
function ty.drop_grads(grads) end

--- Native memory: what tensors take, what is kept besides, and the most they may take.
ty.memory = {}

--- Native memory in bytes: live, beyond (what blocks of live tensors have more, which the budget counts), cached, kept,
-- peak, budget; and the count of allocations. Of a device, of "pinned": page-locked memory, or of "paged": unified
-- memory of all GPUs. kept: see ty.memory.keep_weights. Of "meta": what the calling thread's tensors would take on the
-- CPU, by the rules of its allocator.
---@param device? Device|"pinned"|"paged"
---@return {live: integer, beyond: integer, cached: integer, kept: integer, peak: integer, budget: integer,
---  allocations: integer}
function ty.memory.stats(device) end

--- Lets the peak begin again at what is live now.
---@param device? Device
function ty.memory.reset_peak(device) end

--- Gives cached memory back to the system.
---@param device? Device
function ty.memory.empty_cache(device) end

--- The most bytes tensors may take; an allocation above it is an error that lists the largest live tensors.
---@param device? Device
---@param bytes? integer nothing: the default of the machine
function ty.memory.set_budget(device, bytes) end

--- The most bytes of the CPU's memory for what kernels make of weights: linear, matmul and conv2d copy a weight into
--- panels, or transform it, before they multiply, and from its second use on keep that while the weight stays as it is.
--- Not while gradients are recorded for the weight. What is kept goes when the weight is written or freed, with
--- ty.memory.empty_cache, and when memory is short. stats().kept tells how much it is.
---@param bytes? integer nothing: 256 MiB, or where more than 1 GiB is live a 64th of it, at least 64 MiB; no more than
---  a 32nd of the budget; 0: nothing is kept
function ty.memory.keep_weights(bytes) end

--- NVIDIA GPUs. Tensors live there with device = "cuda" (the first one) or "cuda:1"; x:to "cuda" moves them.
ty.cuda = {}

--- How many can be used; where none can, also why.
---@return integer count
---@return string? reason
function ty.cuda.count() end

--- ty.cuda.count by PyTorch's name.
---@return integer
---@return string|nil reason
function ty.cuda.device_count() end

--- Whether there is a GPU that this build can use.
---@return boolean
function ty.cuda.is_available() end

--- "NVIDIA H100, 80 GiB, compute capability 9.0"
---@param index? integer from 0
---@return string
function ty.cuda.describe(index) end

--- Joules that a GPU has taken since its driver was loaded, by NVIDIA's management library, which is found at run
--- time; nil and why where it does not tell. GPUs are numbered as that library does, whatever CUDA_VISIBLE_DEVICES
--- says.
---@param index? integer from 0
---@return number? joules
---@return string? reason
function ty.cuda.energy(index) end

--- Waits until a GPU has done all that it was given. What went wrong in it, such as an index out of range, is raised
--- here or by whatever else needs its results first.
---@param device? Device
function ty.cuda.synchronize(device) end

--- A stream of a GPU: what is given to one is done in order, what is given to two in any order or at once, unless one
--- waits for the other. Backward passes run on the stream that is current when they begin.
---@class CudaStream
local Stream = {}

--- Waits until the stream has done all that it was given.
function Stream:synchronize() end

--- Whether it has.
---@return boolean
function Stream:query() end

--- What this stream is given from now on waits for what the other has been given so far; the host does not wait.
---@param other CudaStream
function Stream:wait_stream(other) end

--- The same for an event; one that was never recorded is not waited for.
---@param event CudaEvent
function Stream:wait_event(event) end

--- A place in a stream.
---@class CudaEvent
local Event = {}

--- Is now the end of what the stream has been given (the current one, when left out). Returns the event.
---@param stream? CudaStream
---@return CudaEvent
function Event:record(stream) end

--- What the stream (the current one, when left out) is given from now on waits for the event; the host does not wait.
---@param stream? CudaStream
function Event:wait(stream) end

--- Waits for it.
function Event:synchronize() end

--- Whether it has happened; also when it was never recorded.
---@return boolean
function Event:query() end

--- Milliseconds from this event to another; both with timing, recorded and done.
---@param other CudaEvent
---@return number
function Event:elapsed_time(other) end

--- A new stream. There are 31 besides the default one; who makes more gets them again.
---@param device? Device
---@return CudaStream
function ty.cuda.Stream(device) end

--- A new event. timing: it can be asked for elapsed_time.
---@param options? {timing?: boolean}
---@return CudaEvent
function ty.cuda.Event(options) end

--- Runs fn(...) with a stream as the current one of its GPU, which this thread's kernels and copies go to, and returns
--- what it returns. Tensors that were made on one stream and are used on another: let the stream wait for the first
--- (wait_stream), and tell the allocator (Tensor:record_stream) if they are released while it may still use them.
---@param stream CudaStream
---@param fn function
---@return any ...
function ty.cuda.stream(stream, fn, ...) end

--- The stream that this thread's kernels and copies go to now.
---@param device? Device
---@return CudaStream
function ty.cuda.current_stream(device) end

--- The stream that everything goes to when nobody says otherwise.
---@param device? Device
---@return CudaStream
function ty.cuda.default_stream(device) end

--- Whether products of f32 on GPUs may round their factors to 10 bits of fraction, which tensor cores multiply faster.
---@param on boolean
function ty.cuda.allow_tf32(on) end

--- NVIDIA's libraries that were looked for, as `tycho doctor` lists them.
---@return {name: string, version?: string, path?: string, problem?: string, without: string}[]
function ty.cuda.libraries() end

--- Whether an op runs on a device.
---@param op string
---@param device? Device
---@return boolean
function ty.cuda.has_kernel(op, device) end

--- For tests: lets the n-th allocation from now fail, and with `again` all that follow.
---@param n integer
---@param again? boolean
function ty.memory.fail_at(n, again) end

--- For tests: allocations made so far.
---@return integer
function ty.memory.allocation_count() end

--- What ty.compile and ty.fuse are made of, and what optimizers tell a recording.
ty.program = {}

--- A function whose calls are recorded, at most `limit` of them, and replayed; `warm`: a call of a new form first runs
--- unrecorded; `elementwise`: other ops are an error; `early`: optimizers step on each tensor as soon as its gradient
--- is there; `arena`: the most bytes of temporaries (0: any number).
---@param fn function
---@param limit integer
---@param warm boolean
---@param elementwise boolean
---@param early? boolean
---@param arena? integer
---@return function
function ty.program.new(fn, limit, warm, elementwise, early, arena) end

--- For each recording of a compiled function: launches recorded and dropped, steps that run and how many are fused,
--- bytes of the arena and of the temporaries that share it, launches of a replay, updates that run earlier than they
--- were recorded.
---@param compiled function
---@return {recorded: integer, dropped: integer, steps: integer, fused: integer, arena: integer, temporaries: integer,
---  runs: integer, hastened: integer}[]
function ty.program.stats(compiled) end

--- Where the temporaries of its first recording lie in the arena, in bytes, and the steps between which each is needed.
---@param compiled function
---@return {offset: integer, bytes: integer, first: integer, last: integer}[]
function ty.program.places(compiled) end

--- The only recording of a compiled function leaves out optimizers' steps on these tensors from now on, and all that
--- only they needed. Raises when there is no step on one of them.
---@param compiled function
---@param frozen Tensor[]
function ty.program.restrict(compiled, frozen) end

--- The statistics that it would have then; it stays as it is.
---@param compiled function
---@param frozen Tensor[]
---@return {recorded: integer, dropped: integer, steps: integer, fused: integer, arena: integer, temporaries: integer,
---  runs: integer, hastened: integer}
function ty.program.foresee(compiled, frozen) end

--- Whether this runs inside a compiled function, in its first call or while it is recorded.
---@return boolean
function ty.program.is_compiling() end

--- Whether what is computed is being recorded.
---@return boolean
function ty.program.is_recording() end

--- While recording: replays call fn at this place. The numbers it returns are the rate and the step of the optimizer
--- op that follows, or the weight of ty.lerp_list_.
---@param fn fun(): number?, integer?
function ty.program.on_replay(fn) end

--- While recording: the optimizer op before takes its gradients times min(1, limit / (norm + 1e-6)).
---@param norm Tensor 0-d f64
---@param limit number
function ty.program.clip(norm, limit) end

--- The number in a tensor, also while it is recorded: for what replays get otherwise.
---@param t Tensor
---@return number
function ty.program.peek(t) end

--- Makes all recordings void: something has changed that they cannot see.
function ty.program.renew() end

ty.system = {}

--- Seconds of a clock that only goes forward.
---@return number
function ty.system.clock() end

--- Seconds since 1970, with fractions.
---@return number
function ty.system.time() end

--- Waits; Ctrl-C ends it.
---@param seconds number
function ty.system.sleep(seconds) end

--- Whether a file descriptor is a terminal.
---@param descriptor integer
---@return boolean
function ty.system.isatty(descriptor) end

--- The width of a terminal.
---@param descriptor integer
---@return integer?
function ty.system.columns(descriptor) end

--- The number of this process.
---@return integer
function ty.system.pid() end

--- Asks for another cutting of large products into tiles than the one that their shapes give, for all threads from the
-- next product on: rows and columns of a tile at most, whether the first matrix is packed (1), read where it lies (-1)
-- or either by the shape (0). Without arguments, or with zeros, shapes decide again. What is computed stays the same,
-- to the last bit.
---@param rows? integer
---@param columns? integer
---@param pack? integer
function ty.system.product_tiling(rows, columns, pack) end

ty.probe = {}

--- Seconds of one call of a function (char *buffer, long rounds) of a shared library, on the memory of a tensor. For
-- x86-64 processors under Linux.
---@param path string
---@param name string
---@param rounds integer
---@param buffer Tensor
---@return number
function ty.probe.time(path, name, rounds, buffer) end

--- The addresses of the library's instructions that fn() runs on this thread, one after the other, at most so many; and
-- how many more there were. For x86-64 processors under Linux.
---@param fn function
---@param most integer
---@return integer[] addresses
---@return integer lost
function ty.probe.steps(fn, most) end

--- Where an address of probe.steps is: the file that it was loaded from, the address there, and the function, if that
-- has a name.
---@param address integer
---@return string file
---@return integer address
---@return string? name
function ty.probe.where(address) end

ty.thread = {}

--- Starts a thread with a Lua state of its own, in which setup(...) runs and returns the function that answers
--- requests. thread:send(...), thread:receive(), thread:pending(), thread:close().
---@param setup function
function ty.thread.new(setup, ...) end

return { ty, Tensor, Stream, Event }
