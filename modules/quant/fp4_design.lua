--- A simulator of choices in training with four-bit floats: each choice is a field of a design, a design is a policy of
-- quant.linear, and has a cost. Hu et al. 2025, "Elucidating the Design Space of FP4 training".
--
--     local d = quant.fp4_design.design { scale = "ue5m3", tensor = true, hadamard = "backward", rounding = "backward"
--     } local report = quant.linear.attach(model, quant.fp4_design.policy(d))
--     print(quant.fp4_design.name(d), quant.fp4_design.cost(d, 4096, 1024, 1024).overhead)
--
-- What the abstract of the paper leaves open is set so: the surrogate gradient is the staircase of Wang et al. 2025,
-- and the adjusted gradient of a scale takes the rounded scale as so many times the largest element.
local arguments = require "tycho.arguments"
local fp4 = require "tycho.quant.fp4"
local linear = require "tycho.quant.quant_linear"

local expect = arguments.expect
local M = {}

--- The choices of a design, and for each what there is, the default first.
M.choices = {
  scale = { "e8m0", "e4m3", "ue5m3", "float" },
  tensor = { false, true },
  hadamard = { "none", "backward", "both" },
  rounding = { "nearest", "gradient", "backward", "everywhere" },
  gradient = { "ste", "clip", "dge", "absmax", "absmax_adjusted" },
}
local order = { "scale", "block", "tensor", "hadamard", "rounding", "gradient" }

--- A design, checked, with its defaults, which are MXFP4 with straight-through gradients:
--   scale     "e8m0", "e4m3", "ue5m3" or "float"
--   block     elements that share a scale (32; 16 for E4M3, as in NVFP4)
--   tensor    (false) the tensor is scaled by its largest element before its blocks are
--   hadamard  "none"; "backward": with random signs in both backward products; "both": without signs in the forward
--             product as well
--   rounding  what is rounded stochastically: "nearest": nothing; "gradient": the gradient in both backward products;
--             "backward": all operands of those; "everywhere"
--   gradient  of the operands of the forward product: "ste", "clip", "dge", "absmax" or "absmax_adjusted"
-- (quant.fp4.vjp) Where stochastic rounding meets E8M0, the elements are made smaller by 3/4, so that nothing clips.
---@param given? table
---@return table design
function M.design(given)
  local defaults, kinds = { block = arguments.none }, { block = "an integer >= 1", tensor = "a boolean" }
  for key, list in pairs(M.choices) do
    defaults[key] = list[1]
    if key ~= "tensor" then
      local quoted = {}
      for i, choice in ipairs(list) do quoted[i] = ('"%s"'):format(choice) end
      kinds[key] = table.concat(quoted, " or ")
    end
  end
  local d = arguments.read("quant.fp4_design.design", given, defaults, kinds)
  d.block = d.block or (d.scale == "e4m3" and 16 or 32)
  return d
end

--- A design in a few words: "e8m0/32 hadamard=backward".
---@param design table
---@return string
function M.name(design)
  local d = M.design(design)
  local words = { ("%s/%d"):format(d.scale, d.block) }
  if d.tensor then words[2] = "tensor" end
  for _, key in ipairs { "hadamard", "rounding", "gradient" } do
    if d[key] ~= M.choices[key][1] then words[#words + 1] = key .. "=" .. d[key] end
  end
  return table.concat(words, " ")
end

-- How an operand is quantized.
local function operand(d, stochastic, gradient)
  return { scale = d.scale, block = d.block, tensor = d.tensor, rounding = stochastic and "stochastic" or "nearest",
    shrink = stochastic and d.scale == "e8m0" and 0.75 or 1, gradient = gradient }
end

--- The policy of a design.
---@param design table
---@return table policy  of quant.linear.policy
function M.policy(design)
  local d = M.design(design)
  local every, back = d.rounding == "everywhere", d.rounding ~= "nearest" and d.rounding ~= "gradient"
  local forward = operand(d, every, d.gradient)
  local g, other = operand(d, d.rounding ~= "nearest"), operand(d, back)
  local size = 1
  while size * 2 <= d.block do size = size * 2 end
  local turned = d.hadamard ~= "none" and "random" or nil
  return linear.policy {
    forward = { x = forward, w = forward, hadamard = d.hadamard == "both" and "fixed" or nil, size = size },
    input = { g = g, w = other, hadamard = turned, size = size },
    weight = { g = g, x = other, hadamard = turned, size = size } }
end

--- A function of a list of values for each choice: all designs that they make together, in order.
---@param axes table<string, any[]>  { scale = { "e8m0", "ue5m3" }, tensor = { false, true } }
---@return table[] designs
function M.grid(axes)
  expect("quant.fp4_design.grid", "axes", axes, "a table")
  local list = { {} }
  for key in pairs(axes) do
    if key ~= "block" and M.choices[key] == nil then M.design { [tostring(key)] = true } end -- its error names them all
  end
  for _, key in ipairs(order) do
    if axes[key] ~= nil then
      expect("quant.fp4_design.grid", key, axes[key], "a list")
      local longer = {}
      for _, d in ipairs(list) do
        for _, value in ipairs(axes[key]) do
          local copy = { [key] = value }
          for k, v in pairs(d) do copy[k] = v end
          longer[#longer + 1] = copy
        end
      end
      list = longer
    end
  end
  for i, d in ipairs(list) do list[i] = M.design(d) end
  return list
end

--- What a choice does over all others, run by run: the sum of what a grid of designs came to where the choice has a
-- value, of that where it has another.
---@param results { design: table, gaps: number[] }[]  of all combinations; gaps: a number for each run
---@param key string   "hadamard", say
---@param value any
---@param other any
---@return number[] ratios
---@return number[] means  with the other value
function M.effect(results, key, value, other)
  local who = "quant.fp4_design.effect"
  expect(who, "results", results, "a list of tables")
  expect(who, "key", key, "a string")
  if M.choices[key] == nil then M.design { [key] = true } end -- its error names them all
  local ratios, means = {}, {}
  for i in ipairs(results[1] and expect(who, "gaps", results[1].gaps, "a list of numbers") or {}) do
    local sums, count = { [value] = 0, [other] = 0 }, 0
    for _, result in ipairs(results) do
      local own = result.design[key]
      if sums[own] then sums[own] = sums[own] + result.gaps[i] end
      count = count + (own == other and 1 or 0)
    end
    ratios[i], means[i] = sums[value] / sums[other], sums[other] / count
  end
  return ratios, means
end

-- ---- cost ----

-- Operations on numbers, and bytes, that it takes to make an operand of n elements ready: a comparison, an addition, a
-- multiplication, a rounding, a random number, a change of sign are one each. The fast transform adds log2(size) times
-- an element; its factor goes into the scale.
local function operand_cost(n, o, hadamard, size)
  if not o then return 0, 0 end
  local blocks = n // o.block
  local operations, bytes = 0, fp4.bits(o) * n / 8 + 4 * n
  if hadamard then operations = operations + n * math.floor(math.log(size, 2) + 0.5) end
  if hadamard == "random" then operations = operations + n end
  operations = operations + n - blocks + blocks -- the largest element of each block, which is made a scale
  if o.scale ~= "float" then operations = operations + blocks end -- the scale is rounded
  if o.tensor and o.scale ~= "float" then
    operations = operations + (blocks - 1) + 2 * blocks -- the largest of all, in and out of its unit
    bytes = bytes + 4 * n -- nothing can be rounded before all has been read
  end
  operations = operations + 2 * n -- by the scale, rounded
  if o.rounding == "stochastic" then operations = operations + 2 * n end -- a random number, added
  return operations, bytes
end

-- What a rule for gradients adds for an operand of n elements.
local function gradient_cost(n, o)
  if not o or o.gradient == "ste" then return 0, 0 end
  if o.gradient == "clip" then return 2 * n, n / 8 end -- compared, masked; a bit kept
  if o.gradient == "dge" then return 8 * n, 4 * n end -- place in the step (4), power and factor (2), cap, product
  local blocks = n // o.block
  local adjusted = o.gradient == "absmax_adjusted" and 1 or 0
  return 3 * n - blocks + (3 + adjusted) * blocks, 4 * n -- difference, product, sum; by the scale, its slope, added
end

--- What a design takes for a layer, besides the multiplications and additions of its three products, for `rows` rows:
-- operations and bytes of each product (forward, input, weight) and of the gradient rule; in all: operations, bytes,
-- products (multiplications and additions) and overhead, operations over products.
---@param design table
---@param rows integer
---@param inputs integer
---@param outputs integer
---@return table
function M.cost(design, rows, inputs, outputs)
  local who = "quant.fp4_design.cost"
  expect(who, "rows", rows, "an integer >= 1")
  expect(who, "inputs", inputs, "an integer >= 1")
  expect(who, "outputs", outputs, "an integer >= 1")
  local p = M.policy(design)
  local size = { x = rows * inputs, w = inputs * outputs, g = rows * outputs }
  local result = { operations = 0, bytes = 0, products = 3 * 2 * rows * inputs * outputs }
  local function add(name, operations, bytes)
    local part = result[name] or { operations = 0, bytes = 0 }
    result[name] = part
    part.operations, part.bytes = part.operations + operations, part.bytes + bytes
    result.operations, result.bytes = result.operations + operations, result.bytes + bytes
  end
  for name, product in pairs { forward = p.forward, input = p.input, weight = p.weight } do
    for key, n in pairs(size) do
      if product[key] then add(name, operand_cost(n, product[key], product.hadamard, product.size)) end
    end
  end
  for _, key in ipairs { "x", "w" } do
    add("gradient", gradient_cost(size[key], p.forward[key]))
    if p.forward.hadamard then add("gradient", size[key] * math.floor(math.log(p.forward.size, 2) + 0.5), 0) end
  end
  result.overhead = result.operations / result.products
  return result
end

return M
