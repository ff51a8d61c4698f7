--- Linear layers whose three products are quantized as a policy says: the forward pass x w', and in the backward pass
-- the gradient of the input g w and that of the weight g' x. Each operand is rotated and quantized in blocks along the
-- dimension that the product sums over: inputs, outputs and rows. Values are those of the formats, held in f32
-- (quant.fp4); master weights stay what they are.
--
--     local policy = quant.linear.policy {
--       forward = { x = { scale = "e8m0" }, w = { scale = "e8m0" } },
--       input = { hadamard = "random", g = { rounding = "stochastic" }, w = { rounding = "stochastic" } },
--       weight = { hadamard = "random", g = { rounding = "stochastic" }, x = { rounding = "stochastic" } },
--     }
--     local report = quant.linear.attach(model, policy)
--     llm.train.fit(model, ...)
--     quant.linear.detach(model)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local fp4 = require "tycho.quant.fp4"
local hadamard = require "tycho.quant.hadamard"

local surgery = ty.nn.surgery
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

local products = { forward = { "x", "w" }, input = { "g", "w" }, weight = { "g", "x" } }
local rotations = '"fixed" or "random" or nil'

local function read_product(who, name, given)
  local operands = products[name]
  local defaults = { hadamard = none, size = 32, [operands[1]] = none, [operands[2]] = none }
  local o = arguments.read(("%s: %s"):format(who, name), given, defaults, { hadamard = rotations,
    size = "an integer >= 1", [operands[1]] = "a table", [operands[2]] = "a table" })
  for _, key in ipairs(operands) do
    if o[key] then o[key] = fp4.options(("%s: %s: %s"):format(who, name, key), o[key]) end
  end
  return o
end

--- A policy, checked. Of each product (forward: x w'; input: g w, the gradient of the input; weight: g' x, that of the
-- weight):
--   x, w, g    how the operand is quantized, as quant.fp4.options has it; nil: not at all
--   hadamard   "fixed": both operands are rotated by the Hadamard matrix of `size` (32); "random": with signs that are
--              drawn each time; nil: not
-- and saved: what the backward pass begins with, "quantized" (the operands of the forward product, which hardware keeps
-- in four bits) or "exact" (them before they were rounded). Gradients of the forward operands go by their option
-- `gradient`.
---@param given { forward?: table, input?: table, weight?: table, saved?: string }
---@return table policy
function M.policy(given)
  local who = "quant.linear.policy"
  local o = arguments.read(who, given, { forward = {}, input = {}, weight = {}, saved = "quantized" },
    { saved = '"quantized" or "exact"' })
  for name in pairs(products) do o[name] = read_product(who, name, o[name]) end
  o.is_policy = true
  return o
end

local function rotation(product)
  if product.hadamard == "fixed" then return hadamard.matrix(product.size) end
  if product.hadamard == "random" then return hadamard.random(product.size) end
end

-- The columns that a product's blocks and rotation go by: its sums are over a multiple of so many.
local function granularity(product)
  local n = product.hadamard and product.size or 1
  for _, key in ipairs { "x", "w", "g" } do
    local operand = product[key]
    if operand and operand.element ~= "bf16" then n = math.max(n, operand.block) end
  end
  return n
end

local function quantized(x, matrix, options)
  if matrix then x = hadamard.rotate(x, matrix) end
  if not options then return x, {}, x end
  local value, saved = fp4.quantize(x, options)
  return value, saved, x
end

-- x with rows of zeros behind it, so that there are a multiple of n.
local function padded(x, n)
  local over = x.shape[1] % n
  if over == 0 then return x end
  return ty.concat({ x, ty.zeros({ n - over, x.shape[2] }, { dtype = x.dtype, device = x.device }) }, 0)
end

local function turned(x) return x:transpose(0, 1):contiguous() end

local product = ty.custom_op {
  name = "quant.linear",
  forward = function(ctx, x, w, policy)
    local forward = policy.forward
    local matrix = rotation(forward)
    local qx, of_x, exact_x = quantized(x, matrix, forward.x)
    local qw, of_w, exact_w = quantized(w, matrix, forward.w)
    local keeps = policy.saved == "quantized" and { qx, qw } or { exact_x, exact_w }
    for _, list in ipairs { of_x, of_w } do
      for _, t in ipairs(list) do keeps[#keeps + 1] = t end
    end
    ctx.policy, ctx.matrix, ctx.count = policy, matrix and ty.keep(matrix), #of_x
    ctx:save(table.unpack(keeps))
    return ty.linear(qx, qw)
  end,
  backward = function(ctx, g)
    local policy, matrix = ctx.policy, ctx.matrix
    local saved = { ctx:saved() }
    local x, w = saved[1]:detach(), saved[2]:detach()
    local function back(grad, options, first, last)
      if options then grad = fp4.vjp(grad, { table.unpack(saved, first, last) }, options) end
      return matrix and hadamard.unrotate(grad, matrix) or grad
    end
    g = g:contiguous()
    local turn = rotation(policy.input)
    local gx = ty.linear((quantized(g, turn, policy.input.g)), (quantized(turned(w), turn, policy.input.w)))
    turn = rotation(policy.weight)
    local n = granularity(policy.weight)
    local gw = ty.linear((quantized(turned(padded(g, n)), turn, policy.weight.g)),
      (quantized(turned(padded(x, n)), turn, policy.weight.x)))
    return back(gx, policy.forward.x, 3, 2 + ctx.count), back(gw, policy.forward.w, 3 + ctx.count, #saved)
  end,
}

--- x [..., in] times w [out, in] transposed, with the three products of a policy.
---@param x Tensor
---@param w Tensor
---@param policy table  of policy()
---@return Tensor [..., out]
function M.linear(x, w, policy)
  local who = "quant.linear.linear"
  expect(who, "x", x, "a tensor")
  expect(who, "w", w, "a tensor")
  if type(policy) ~= "table" or not policy.is_policy then
    fail("%s: policy: expected one of quant.linear.policy, got %s", who, arguments.describe(policy))
  end
  local shape = x.shape
  if #shape == 0 or #w.shape ~= 2 or shape[#shape] ~= w.shape[2] then
    fail("%s: x: expected [..., in] for w [out, in], got %s and %s", who, arguments.describe(x), arguments.describe(w))
  end
  if granularity(policy.forward) > 1 and shape[#shape] % granularity(policy.forward) ~= 0
    or w.shape[1] % granularity(policy.input) ~= 0 then
    fail("%s: w: expected [out, in] of whole blocks (%d and %d), got %s", who, granularity(policy.input),
      granularity(policy.forward), arguments.describe(w))
  end
  local y = product(x:reshape(-1, shape[#shape]), w, policy)
  shape[#shape] = w.shape[1]
  return y:reshape(shape)
end

-- ---- layers of a model ----

local wrapper = surgery.wrapper { name = "Quant", field = "_quant_linear",
  forward = function()
    return function(self, x, residual, activation)
      local weight = self.weight
      if self.fan_in_fan_out then weight = weight:transpose(0, 1) end
      local y = M.linear(x, weight, self._quant_linear.policy)
      if self.bias then y = y + self.bias end
      return surgery.finish(y, residual, activation)
    end
  end,
  describe = function() return "quantized products" end }

--- Puts a policy on the linear layers of a model, but for its head. options: targets and skip as nn.surgery.find has
-- them, head (false). Returns a report: layers (how many), share (of the multiplications of the linear layers, the head
-- among them only where `head` says so, that go by the policy), left (names of layers whose sizes are no whole blocks).
---@param model Module
---@param policy table  of policy()
---@param options? { targets?: string|string[]|function, skip?: string[], head?: boolean }
---@return { layers: integer, share: number, left: string[] }
function M.attach(model, policy, options)
  local who = "quant.linear.attach"
  expect(who, "model", model, "a module")
  if type(policy) ~= "table" or not policy.is_policy then
    fail("%s: policy: expected one of quant.linear.policy, got %s", who, arguments.describe(policy))
  end
  local o = arguments.read(who, options, { targets = none, skip = {}, head = false }, { targets = false })
  local all, done, layers, left = 0, 0, 0, {}
  for _, layer in ipairs(surgery.find(who, model, { head = o.head })) do all = all + layer.module.weight:numel() end
  for _, layer in ipairs(surgery.find(who, model, { targets = o.targets, skip = o.skip, head = o.head })) do
    local inputs, outputs = surgery.sizes(layer.module)
    if inputs % granularity(policy.forward) == 0 and outputs % granularity(policy.input) == 0 then
      wrapper:wrap(layer.module, { policy = policy })
      layers, done = layers + 1, done + layer.module.weight:numel()
    else
      left[#left + 1] = layer.name
    end
  end
  return { layers = layers, share = all > 0 and done / all or 0, left = left }
end

--- Takes the policies off again. Returns how many layers had one.
---@param model Module
---@return integer
function M.detach(model)
  local list = wrapper:wrapped("quant.linear.detach", model)
  for _, layer in ipairs(list) do wrapper:unwrap(layer.module) end
  return #list
end

return M
