--- Networks of bytes: a float network for pictures as a graph of integer convolutions and sums, with int8 weights and
-- int8 activations, and the gradients of that graph as if it did not round. Jacob et al. 2018, "Quantization and
-- Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"; Lin et al. 2022, "On-Device Training
-- Under 256KB Memory".
--
-- A code q stands for (q - zero) * scale. Weights have a scale for each output channel and no zero point; a bias counts
-- in the units of the sums it is added to, so its scale is that of the input times the weight's.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- A network of bytes, of tiny.int8. Its nodes, in the order they run: kind ("conv", "add"), name, inputs (places of
-- nodes, 0: the picture), zero and scale of the result, low (what it is cut to from below); of a convolution weight i8,
-- bias f32, weight_scale f32 and factor f32 [out] (of its sums to codes of the result), stride, padding, groups.
---@class Int8Network
---@field nodes table[]
---@field input { zero: integer, scale: number }
---@field last integer   the node whose means are the features
---@field width integer  of the features
local Network = {}
Network.__index = Network

--- Raises where an argument is no network of bytes.
---@param who string
---@param network any
function M.check(who, network)
  if getmetatable(network) ~= Network then
    fail("%s: network: expected one of tiny.int8, got %s", who, arguments.describe(network))
  end
end

-- ---- from a float network ----

-- A scale and a zero point for values between low and high, 0 among them.
local function range_of(t)
  local low, high = math.min(0, t:amin():item()), math.max(0, t:amax():item())
  local scale = math.max(high - low, 1e-8) / 255
  return scale, math.max(-128, math.min(127, math.floor(-128 - low / scale + 0.5)))
end

--- Codes of a weight, symmetric, and a scale for each output: the largest of it becomes 127.
---@param weight Tensor  [out, ...]
---@return Tensor codes  i8
---@return Tensor scale  f32 [out]
function M.weight(weight)
  expect("tiny.int8_weight", "weight", weight, "a tensor")
  if weight.ndim < 2 or not weight:is_floating_point() then
    fail("tiny.int8_weight: weight: expected floats [out, ...], got %s", arguments.describe(weight))
  end
  local rows = weight:detach():to("f32"):flatten(1)
  local scale = rows:abs():amax({ 1 }):clamp { min = 1e-8 } / 127
  return (rows / scale:unsqueeze(1)):round():clamp(-127, 127):to("i8"):reshape(table.unpack(weight.shape)), scale
end

-- The graph that a trace shows: nodes by their results.
local Reader = {}
Reader.__index = Reader

local function refuse(text, ...) fail("tiny.int8: model: " .. text, ...) end

function Reader:place(t, op)
  local place = self.places[t]
  if not place then refuse("%s takes a tensor that no convolution or sum gave", op) end
  return place
end

-- A node whose result is t.
function Reader:add(node, t)
  node.scale, node.zero = range_of(t)
  node.low, node.shape = -128, t.shape
  self.nodes[#self.nodes + 1] = node
  self.places[t] = #self.nodes
end

local ops = {}

function ops.conv2d(self, a, y)
  for _, d in ipairs(a.dilation or { 1 }) do if d ~= 1 then refuse("a convolution with dilation") end end
  if a.residual or (a.activation or "none") ~= "none" then refuse("a convolution that adds or activates by itself") end
  local weight, scale = M.weight(a.weight)
  self:add({ kind = "conv", name = self.names[a.weight], inputs = { self:place(a.x, "conv2d") }, weight = weight,
    weight_scale = scale, real_bias = a.bias or nil, stride = a.stride, padding = a.padding, groups = a.groups }, y)
end

function ops.add(self, a, y)
  local inputs = { self:place(a.x, "add"), self:place(a.y, "add") }
  self:add({ kind = "add", name = "add" .. #self.nodes, inputs = inputs }, y)
end

-- An activation that cuts: the range of its result is that of the node before.
local function cuts(self, a, y)
  local place = self:place(a.x, "an activation")
  local node = self.nodes[place]
  if place == 0 then refuse("an activation of the picture") end
  node.scale, node.zero = range_of(y)
  node.low = node.zero
  self.places[y] = place
end

function ops.batch_norm() refuse("a batch norm: fold it first (tiny.fold)") end

ops.relu = cuts
function ops.hardtanh(self, a, y)
  if a.min ~= 0 then refuse("hardtanh from %s: expected from 0, as relu6", tostring(a.min)) end
  cuts(self, a, y)
end
function ops.clamp(self, a, y)
  if a.min ~= 0 then refuse("clamp from %s: expected from 0", tostring(a.min)) end
  cuts(self, a, y)
end

function ops.mean(self, a, y)
  self.last, self.features = self:place(a.x, "mean"), y
end

-- What an op of a trace got, by name; views that change nothing are followed.
local same = { detach = true, contiguous = true, dropout = true }

local function read(self, events, i, stop)
  while i < stop do
    local event = events[i]
    local behind = i + 1
    while events[behind] and events[behind].depth > event.depth do behind = behind + 1 end
    if self.last then return end
    local y = event.out[1]
    if same[event.op] and self.places[event.args.x] then
      self.places[y] = self.places[event.args.x]
    elseif ops[event.op] then
      ops[event.op](self, event.args, y)
    elseif behind > i + 1 then
      read(self, events, i + 1, behind) -- what it is made of
    else
      refuse("the op %s before the means: expected convolutions, sums and relu", event.op)
    end
    i = behind
  end
end

-- The units of each node's inputs: what its own numbers are made of.
local function settle(self)
  for _, node in ipairs(self.nodes) do
    local from = node.inputs[1] == 0 and self.input or self.nodes[node.inputs[1]]
    if node.kind == "conv" then
      node.x_scale, node.x_zero = from.scale, from.zero
      node.factor = ty.keep(node.weight_scale * (from.scale / node.scale))
      local units = node.weight_scale * from.scale
      node.bias = ty.keep(node.real_bias and node.real_bias:detach():to "f32" / units or ty.zeros(units.shape[1]))
      node.weight, node.weight_scale = ty.keep(node.weight), ty.keep(node.weight_scale)
    else
      node.from = {}
      for k, place in ipairs(node.inputs) do
        local one = place == 0 and self.input or self.nodes[place]
        node.from[k] = { zero = one.zero, factor = one.scale / node.scale }
      end
    end
    node.real_bias = nil
  end
end

--- A network of bytes that does what a float network does up to the means over its last maps, which are the features:
-- convolutions, sums, relu and relu6, in evaluation mode, batch norms folded (tiny.fold). Ranges are those that the
-- pictures show.
---@param model Module
---@param pictures Tensor  f32 [n, c, h, w], for the ranges
---@return Int8Network
function M.network(model, pictures)
  expect("tiny.int8", "model", model, "a module")
  expect("tiny.int8", "pictures", pictures, "a tensor")
  model:eval()
  local names, known, list = {}, {}, {}
  for name, p in model:named_parameters() do known[#known + 1], list[#list + 1] = name:gsub("%.weight$", ""), p end
  local function run(x) return ty.no_grad(model.forward, model, x) end
  local events, given = ty.core.program.trace(run, pictures, table.unpack(list))
  for i, name in ipairs(known) do names[given[i + 1]] = name end -- the trace's handles
  local self = setmetatable({ nodes = {}, input = {} }, Network)
  self.input.scale, self.input.zero = range_of(pictures)
  local reader = setmetatable({ nodes = self.nodes, places = { [given[1]] = 0 }, names = names }, Reader)
  read(reader, events, 1, #events + 1)
  if not reader.last or reader.last == 0 then refuse("expected means over maps behind its convolutions") end
  self.last, self.width = reader.last, self.nodes[reader.last].shape[2]
  settle(self)
  return self
end

--- A network with the same codes, whose weights can be trained apart.
---@return Int8Network
function Network:clone()
  local copy = setmetatable({}, Network)
  for key, value in pairs(self) do copy[key] = value end
  copy.nodes = {}
  for i, node in ipairs(self.nodes) do
    local new = {}
    for key, value in pairs(node) do new[key] = value end
    if node.kind == "conv" then
      new.weight, new.bias = ty.keep(node.weight:clone()), ty.keep(node.bias:clone())
    end
    copy.nodes[i] = new
  end
  return copy
end

-- ---- forward ----

--- Codes of pictures, i8.
---@param pictures Tensor
---@return Tensor
function Network:codes(pictures)
  return ((pictures / self.input.scale):round() + self.input.zero):clamp(-128, 127):to "i8"
end

--- The results of all nodes, codes i8, [0]: the input.
---@param x Tensor  codes i8 [n, c, h, w]
---@return table<integer, Tensor>
function Network:forward(x)
  local y = { [0] = x }
  for i, node in ipairs(self.nodes) do
    if node.kind == "conv" then
      y[i] = ty.conv2d_int8(y[node.inputs[1]], node.weight, node.bias, node.factor, node.stride, node.padding,
        node.groups, node.x_zero, node.zero, node.low)
    else
      local a, b = node.from[1], node.from[2]
      y[i] = ty.add_int8(y[node.inputs[1]], y[node.inputs[2]], a.factor, b.factor, a.zero, b.zero, node.zero, node.low)
    end
  end
  return y
end

--- The features of codes: means over the last maps, f32 [n, width].
---@param y table<integer, Tensor>  of forward()
---@return Tensor
function Network:features(y)
  local node = self.nodes[self.last]
  return (y[self.last]:to "f32":mean { 2, 3 } - node.zero) * node.scale
end

-- ---- backward ----

local function add(sum, g) return sum and sum + g or g end

--- Gradients of a loss for codes of weights and biases, as if nothing were rounded. wanted: by the place of a
-- convolution the share of its input channels whose weights are wanted, 0 for the bias alone. given: what features()
-- got a gradient of, f32 [n, width]. Calls found(place, gradient of the weight (nil), gradient of the bias) as each is
-- there, and ends before the first node that is wanted.
---@param y table<integer, Tensor>  of forward()
---@param given Tensor
---@param wanted table<integer, number>
---@param found fun(place: integer, weight?: Tensor, bias: Tensor)
function Network:backward(y, given, wanted, found)
  local needs, kept = { [0] = false }, {} -- whether a node or one before it is wanted; the channels that are kept
  for i, node in ipairs(self.nodes) do
    needs[i] = wanted[i] ~= nil
    for _, place in ipairs(node.inputs) do needs[i] = needs[i] or needs[place] end
    if wanted[i] and wanted[i] < 1 then
      local x = y[node.inputs[1]]
      kept[i] = x:narrow(1, 0, node.groups > 1 and 0 or self:channels(i, wanted[i])):contiguous()
    end
  end
  local last = self.nodes[self.last]
  local area = y[self.last].shape[3] * y[self.last].shape[4]
  local g = {}
  if needs[self.last] then
    local each = (given * (last.scale / area)):reshape(given.shape[1], -1, 1, 1)
    g[self.last] = each:expand(table.unpack(y[self.last].shape)):contiguous()
  end
  for i = #self.nodes, 1, -1 do
    local node, gi = self.nodes[i], g[i]
    g[i] = nil
    if gi and node.kind == "add" then
      for k, place in ipairs(node.inputs) do
        if needs[place] then g[place] = add(g[place], ty.inside_int8(gi, y[i], node.from[k].factor, node.low)) end
      end
    elseif gi then
      local x = y[node.inputs[1]]
      if wanted[i] then
        local size, some = table.pack(table.unpack(node.weight.shape)), kept[i] or x
        if kept[i] then size[2] = some.shape[2] end
        local dw, db = ty.conv2d_int8_backward_weight(gi, y[i], some, node.factor, size, node.stride, node.padding,
          node.groups, node.x_zero, node.low)
        found(i, wanted[i] > 0 and dw or nil, db)
      end
      local place = node.inputs[1]
      if needs[place] then
        g[place] = add(g[place], ty.conv2d_int8_backward_input(gi, y[i], node.weight, node.factor, x.shape, node.stride,
          node.padding, node.groups, node.low))
      end
    end
  end
end

--- How many input channels of a convolution a share of them is.
---@param place integer
---@param share number
---@return integer
function Network:channels(place, share)
  local channels = self.nodes[place].weight.shape[2]
  return share == 0 and 0 or math.max(1, math.floor(share * channels + 0.5))
end

return M
