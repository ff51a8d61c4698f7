--- Training primitives in reduced precision: forward, the gradient of the input and that of the weight of a layer as
-- matrix products whose operands are f16 or bf16 and whose sums are f32, and what each of them takes. Nadalini et al.
-- 2023, "Reduced Precision Floating-Point Optimization for Deep Neural Network On-Device Learning on MicroControllers".
--
--     print(tiny.primitives(models.DSCNN(), ty.randn(32, 1, 49, 10)))   -- MAC per clock by layer form and primitive
--     local step = tiny.step(model, optimizer, loss, "bf16")            -- f32 weights; products, activations in bf16
--     step(x, y)
--
-- A convolution is the product of its weight [out, c kh kw] with the matrix of windows [c kh kw, positions]; its
-- input's gradient that of the turned weight with the gradient, put back to where windows overlap; its weight's
-- gradient that of the gradient with the turned matrix of windows. Pointwise convolutions need no windows, depthwise
-- ones are sums by channel. The products are of two neighbours at a time where the processor has an instruction for
-- that.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local surgery = ty.nn.surgery
local M = {}

-- ---- counts ----

-- The layers of a model in the order they run, with what they got and gave.
local watched = surgery.wrapper {
  name = "Counted", field = "_counted",
  forward = function(base)
    return function(self, x, ...)
      local y = base.forward(self, x, ...)
      self._counted.see(self, x, y)
      return y
    end
  end,
}

local function layers_of(model, x)
  local list, names = {}, {}
  local found = surgery.find("tiny.primitives", model, { kinds = { "linear", "conv" }, head = false })
  for _, layer in ipairs(found) do
    names[layer.module] = layer.name
    watched:wrap(layer.module, { see = function(module, input, output)
      list[#list + 1] = { name = names[module], module = module, x = input:detach(), y = output:detach(),
        kind = surgery.kind(module) }
    end })
  end
  local ok, problem = pcall(ty.no_grad, model.forward, model, x)
  for _, layer in ipairs(watched:wrapped("tiny.primitives", model)) do watched:unwrap(layer.module) end
  if not ok then error(problem, 0) end
  return list
end

--- "pointwise", "depthwise", "convolution" or "linear".
---@param module Module
---@return string
function M.form(module)
  if surgery.kind(module) == "linear" then return "linear" end
  if module.groups > 1 then return "depthwise" end
  return module.kernel_size[1] * (module.kernel_size[2] or 1) == 1 and "pointwise" or "convolution"
end

-- Multiplications and additions of one primitive: the same for all three.
local function macs(layer) return layer.y:numel() * surgery.sizes(layer.module) end

-- The three primitives of a layer in a dtype, as functions.
local function primitives(layer, dtype)
  local m = layer.module
  local x, w, g = layer.x:to(dtype), m.weight:detach():to(dtype), ty.randn(layer.y.shape):to(dtype)
  if layer.kind == "linear" then
    local rows, grad = x:reshape(-1, x.shape[x.ndim]), g:reshape(-1, g.shape[g.ndim])
    return { forward = function() return ty.linear(rows, w) end, input = function() return grad:matmul(w) end,
      weight = function() return grad:transpose(0, 1):matmul(rows) end }
  end
  local s, p, d, n = m.stride, m.padding, m.dilation, m.groups
  return { forward = function() return ty.conv2d(x, w, nil, s, p, d, n) end,
    input = function() return ty.conv2d_backward_input(g, w, x.shape, s, p, d, n) end,
    weight = function() return ty.conv2d_backward_weight(g, x, w.shape, s, p, d, n) end }
end

--- The order in which primitives are told.
M.order = { "forward", "input", "weight" }

--- The primitives of a network's layers in two precisions, timed, of tiny.half.
---@class Primitives
---@field rows table[]  layer, form, primitive, macs, seconds (by dtype)
---@field clock number  cycles a second, that rates are told by
local Primitives = {}
Primitives.__index = Primitives

local function cpuinfo(key)
  local file <close> = io.open "/proc/cpuinfo"
  for line in file and file:lines() or function() end do
    local name, value = line:match "^([%w ]-)%s*:%s*(.*)"
    if name == key then return value end
  end
end

--- The processor's cycles a second as the system says, by which rates are told; nil where it does not.
---@return number?
function M.clock()
  local megahertz = tonumber(cpuinfo "cpu MHz")
  return megahertz and megahertz * 1e6
end

--- Whether the processor multiplies pairs of bf16 in one instruction.
---@return boolean
function M.has_bf16()
  local flags = " " .. (cpuinfo "flags" or "") .. " "
  return flags:find " avx512_bf16 " ~= nil
end

--- A training step whose products are in a precision: weights and the optimizer's states stay f32, what layers hand on
-- is of that precision, sums are f32. Recorded and replayed (ty.compile).
---@param model Module
---@param optimizer Optimizer
---@param loss fun(model: Module, ...): Tensor
---@param dtype "f32"|"bf16"
---@return fun(...): Tensor
function M.step(model, optimizer, loss, dtype)
  local who = "tiny.step"
  expect(who, "model", model, "a module")
  expect(who, "optimizer", optimizer, "a table")
  expect(who, "loss", loss, "a function")
  expect(who, "dtype", dtype, '"f32" or "bf16"')
  return ty.compile(function(...)
    local value = ty.autocast(dtype, loss, model, ...)
    optimizer:step(value)
    return value
  end)
end

--- What forward, input gradient and weight gradient of each layer take in some dtypes. options: dtypes ({ "f32", "bf16"
-- }), rounds (5; the best counts), clock (cycles a second; what the system says, or else a GHz).
---@param model Module
---@param x Tensor  what the model gets
---@param options? table
---@return Primitives
function M.primitives(model, x, options)
  local who = "tiny.primitives"
  expect(who, "model", model, "a module")
  expect(who, "x", x, "a tensor")
  local o = arguments.read(who, options, { dtypes = { "f32", "bf16" }, rounds = 5, clock = arguments.none },
    { dtypes = "a list of strings", rounds = "an integer >= 1", clock = "a number > 0" })
  local self = setmetatable({ rows = {}, clock = o.clock or M.clock() or 1e9 }, Primitives)
  for _, layer in ipairs(layers_of(model, x)) do
    for _, name in ipairs(M.order) do
      self.rows[#self.rows + 1] = { layer = layer.name, form = M.form(layer.module), primitive = name,
        macs = macs(layer), seconds = {} }
    end
    for _, dtype in ipairs(o.dtypes) do
      local run = primitives(layer, dtype)
      for k, name in ipairs(M.order) do
        local row, best = self.rows[#self.rows - #M.order + k], math.huge
        for _ = 0, o.rounds do
          local began = ty.system.clock()
          ty.scope(run[name])
          best = math.min(best, ty.system.clock() - began)
        end
        row.seconds[dtype] = best
      end
    end
  end
  return self
end

--- Sums by form and primitive: a list of { form, primitive, macs, seconds by dtype }.
---@return table[]
function Primitives:sums()
  local list, known = {}, {}
  for _, row in ipairs(self.rows) do
    local key = row.form .. " " .. row.primitive
    local sum = known[key]
    if not sum then
      sum = { form = row.form, primitive = row.primitive, macs = 0, seconds = {} }
      known[key], list[#list + 1] = sum, sum
    end
    sum.macs = sum.macs + row.macs
    for dtype, s in pairs(row.seconds) do sum.seconds[dtype] = (sum.seconds[dtype] or 0) + s end
  end
  return list
end

function Primitives:__tostring()
  local lines = {}
  for _, row in ipairs(self:sums()) do
    local cells, dtypes = {}, {}
    for dtype in pairs(row.seconds) do dtypes[#dtypes + 1] = dtype end
    table.sort(dtypes)
    for _, dtype in ipairs(dtypes) do
      cells[#cells + 1] = ("%s %.2f MAC/clk"):format(dtype, row.macs / row.seconds[dtype] / self.clock)
    end
    lines[#lines + 1] = ("%s, %s: %.2f MMAC, %s"):format(row.form, row.primitive, row.macs / 1e6,
      table.concat(cells, ", "))
  end
  return table.concat(lines, "\n")
end

return M
