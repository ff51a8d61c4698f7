--- ty.compile and ty.fuse: functions whose calls are recorded once and then replayed without Lua and without dispatch.
local ty = require "tycho"
local checks = require "tycho.arguments"
local program = ty.core.program

local words = { limit = "an integer in [1, 64]", early = "a boolean", arena = "an integer >= 0" }

-- The options: the number of forms that are recorded, and others.
local function read_options(who, fn, options, defaults)
  checks.expect(who, "fn", fn, "a function")
  return checks.read(who, options, defaults, words)
end

--- A function that does what fn does, faster: a whole training step, or the forward pass of a model.
--
--     local step = ty.compile(function(x, y)
--       local loss = ty.cross_entropy(model(x), y)
--       optimizer:step(loss)
--       return loss
--     end)
--     for x, y in batches do total = total + step(x, y):item() end
--
-- The first call with arguments of some form runs fn as it is, the second runs it once more and records what it
-- computes, those after it replay the recording: the same kernels on the same shapes, with the same numbers as without
-- compile. Work whose results nobody reads is left out, chains of elementwise ops run as one loop, and temporaries
-- share one block of memory that stays with the function.
--
-- Another form of the arguments (shape, dtype, strides, requires_grad; the value of those that are no tensors) or
-- another mode of gradients gets a recording of its own, up to `options.limit` (16); calls beyond run fn as it is.
-- Parameters, optimizer states and other tensors that fn finds outside are used where they are, so load_state_dict and
-- :copy_ are seen; after module:to, :train, :eval or optimizer:load_state_dict everything is recorded anew.
--
-- What replays do not do is run Lua. So inside fn:
--
--   * elements cannot be looked at (:item, :tolist, printing, conditions on data): that is an error. Return the tensor.
--   * numbers, flags and tensors made from Lua values are constants of the recording. Optimizers, their rates and
--     schedules, EMA and random numbers go on as they would (Optimizer:step returns the norm of the gradients as a
--     tensor).
--   * state is changed in place: replacing a tensor that fn reads by another one is an error.
--   * arguments have no history, results neither: gradients do not flow through a compiled function, :backward()
--     belongs into it. Results are new tensors at each call; gradients that fn leaves on parameters and arguments
--     are overwritten by the next.
--   * coroutines cannot yield.
--   * results are tensors, numbers, strings, booleans or nil, not tables.
--
-- A compiled function that is called while another one is recorded becomes a part of it.
--
-- With tensors on a GPU the recording is captured into CUDA graphs, cut where numbers change from call to call (an
-- optimizer's step, a draw of random numbers); ty.graph is another name for it there.
--
-- Further options: `early` (false) lets an optimizer step on each tensor as soon as its gradient is there, in place of
-- all at the end, so that gradients do not add up, where no norm of all of them is asked for; the numbers are the same.
-- `arena` (0: any number) is the most bytes that temporaries may take; a recording that needs more is an error.
---@generic F: function
---@param fn F
---@param options? {limit: integer, early: boolean, arena: integer}
---@return F
local function compile(fn, options)
  local o = read_options("compile", fn, options, { limit = 16, early = false, arena = 0 })
  return program.new(fn, o.limit, true, false, o.early, o.arena)
end

-- The gradients of f as a function: vjp(wanted, came, n, x1 .. xn, g ...) of f's arguments, where `wanted` has a letter
-- for each of them and `came` one for each result (y or n), and of the gradients that came. It runs f again, so that
-- nothing but the arguments is kept, and is itself differentiable in what it is given.
local function vjp_of(f)
  return function(wanted, came, n, ...)
    local create = ty.is_grad_enabled()
    local given, leaves = table.pack(...), {}
    for i = 1, n do
      if wanted:sub(i, i) == "y" then
        if not (create and given[i].requires_grad) then given[i] = given[i]:detach():requires_grad_() end
        leaves[#leaves + 1] = given[i]
      end
    end
    local results = table.pack(ty.enable_grad(f, table.unpack(given, 1, n)))
    local outputs, grads, at = {}, {}, n
    for i = 1, results.n do
      if came:sub(i, i) == "y" then
        at = at + 1
        if results[i].requires_grad then outputs[#outputs + 1], grads[#grads + 1] = results[i], given[at] end
      end
    end
    local found = {}
    if #outputs > 0 then
      found = ty.grad(outputs, leaves, { grad_outputs = grads, create_graph = create, allow_unused = true })
    end
    for i, leaf in ipairs(leaves) do found[i] = found[i] or ty.zeros_like(leaf) end
    return table.unpack(found, 1, #leaves)
  end
end

-- f as one op whose results run() computes and whose gradients rule() makes a function for.
local function as_op(f, run, rule)
  local backward
  local function record(...)
    local arguments, inputs, wanted = table.pack(...), {}, {}
    for i = 1, arguments.n do
      local wants = ty.is_tensor(arguments[i]) and arguments[i].requires_grad
      wanted[i] = wants and "y" or "n"
      if wants then inputs[#inputs + 1] = arguments[i] end
    end
    local results = table.pack(ty.no_grad(run, ...))
    for i = 1, results.n do
      if results[i].requires_grad then results[i] = results[i]:detach() end
    end
    ty.record("fuse", inputs, results, function(...)
      local came, all = {}, table.move(arguments, 1, arguments.n, 1, {})
      local n = arguments.n
      for i = 1, results.n do
        local g = select(i, ...)
        came[i] = g and "y" or "n"
        if g then
          n = n + 1
          all[n] = g
        end
      end
      backward = backward or rule(vjp_of(f))
      return backward(table.concat(wanted), table.concat(came), arguments.n, table.unpack(all, 1, n))
    end)
    return table.unpack(results, 1, results.n)
  end
  return function(...)
    if ty.is_grad_enabled() and not program.is_recording() then
      for i = 1, select("#", ...) do
        local argument = select(i, ...)
        if ty.is_tensor(argument) and argument.requires_grad then return record(...) end
      end
    end
    return run(...)
  end
end

-- Derivatives from the second on, which run in Lua.
local function unrecorded(f) return as_op(f, f, unrecorded) end

--- A function that runs a chain of elementwise ops as one loop: each input is read once, each result written once, and
-- what is between never leaves the cache.
--
--     local gelu = ty.fuse(function(x, bias)
--       local y = x + bias
--       return 0.5 * y * (1 + ty.tanh(0.7978845608 * (y + 0.044715 * y ^ 3)))
--     end)
--
-- fn gets tensors and numbers and returns tensors; it may use ops that work element by element, with broadcasting,
-- where, casts and constants; any other op is an error that names it. Each form of the arguments (shape, dtype,
-- strides) is recorded at its first call, up to `options.limit` (32), beyond which fn runs as it is. The numbers are
-- those of fn. Below 16384 elements everything is in the cache anyway, and only the work around the kernels is saved.
--
-- The result is differentiable: the backward pass is recorded too and computes the intermediate results again, so that
-- nothing but the arguments is kept. Second derivatives run fn as it is.
---@generic F: function
---@param fn F
---@param options? {limit: integer}
---@return F
local function fuse(fn, options)
  local limit = read_options("fuse", fn, options, { limit = 32 }).limit
  return as_op(fn, program.new(fn, limit, false, true), function(vjp)
    return as_op(vjp, program.new(vjp, limit, false, false), unrecorded)
  end)
end

return { compile = compile, graph = compile, fuse = fuse }
