--- Long convolutions: each channel of a sequence meets a kernel of its own, as long as the sequence, that is learnt tap
-- by tap. Fu et al. 2023, "Simple Hardware-Efficient Long Convolutions for Sequence Modeling". What makes them
-- generalize is that their kernels are regular: squash() takes `squash` off the size of each tap, so that small ones
-- are 0 and large ones have to be worth it; a moving average over `smooth` taps may do so as well.
--
--     local model = models.LongConv { inputs = 2, outputs = 8, taps = 500, both = true }
--     local logits = model(signal)                        -- [n, 500, 2] to [n, 8]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

--- Taps, with `by` taken off their size: soft thresholds. Those that are smaller become 0 and get no gradient.
---@param kernel Tensor
---@param by number
---@return Tensor
local function squash(kernel, by) return kernel - kernel:clamp(-by, by) end

--- Means of `width` neighbours, odd, with zeros beyond the ends: the kernel convolved with a box.
---@param kernel Tensor  [c, taps]
---@param width integer
---@return Tensor
local function smooth(kernel, width)
  local box = ty.full({ kernel.shape[1], width }, 1 / width, { dtype = kernel.dtype, device = kernel.device })
  return ty.long_conv(kernel, box, width // 2)
end

local Kernel = nn.module "LongKernel"

-- options: as LongConv's.
function Kernel:init(width, o)
  self.ahead = o.both and o.taps - 1 or 0
  self.taps, self.squash, self.smooth, self.dropout = o.taps, o.squash, o.smooth, o.kernel_dropout
  local taps = self.ahead + o.taps
  local scale = 0.002
  if o.decay then -- channel h forgets at a rate of (width / 2) ^ (h / width) over the sequence, to either side
    local rate = ty.pow(math.max(1, width / 2), ty.arange(width):to "f32" / width):unsqueeze(1)
    scale = 0.02 * ((ty.arange(taps) - self.ahead):abs():to "f32" * rate / -o.taps):exp()
  end
  self.kernel = nn.Parameter(ty.randn(width, taps) * scale)
  self.skip = nn.Parameter(ty.randn(width))
end

--- The kernels [width, taps], averaged and squashed.
---@return Tensor
function Kernel:regular()
  local kernel = self.kernel
  if self.smooth > 1 then kernel = smooth(kernel, self.smooth) end
  return self.squash > 0 and squash(kernel, self.squash) or kernel
end

--- x [n, width, t] to [n, width, t].
function Kernel:forward(x)
  local t, kernel = x.shape[3], ty.dropout(self:regular(), self.dropout, self.training)
  kernel = kernel + ty.pad(self.skip:unsqueeze(1), { self.ahead, self.taps - 1 }) -- the skip is the tap of the present
  if t == 0 or t >= self.taps then return ty.long_conv(x, kernel, self.ahead) end
  local ahead = math.min(self.ahead, t - 1) -- taps that reach nothing are left out
  return ty.long_conv(x, kernel:narrow(1, self.ahead - ahead, ahead + t), ahead)
end

local Block = nn.module "LongConvBlock"

function Block:init(o)
  self.norm = nn.LayerNorm(o.width)
  self.conv = Kernel(o.width, o)
  self.linear = nn.Linear(o.width, 2 * o.width)
  self.dropout = nn.Dropout(o.dropout)
end

-- x [n, t, width]
function Block:forward(x)
  local y = self.conv(self.norm(x):transpose(1, 2)):gelu()
  return x + self.dropout(ty.glu(self.linear(y:transpose(1, 2))))
end

---@class LongConv: Module
local LongConv = nn.module "LongConv"

local defaults = { inputs = 1, vocabulary = 0, outputs = 2, width = 64, layers = 4, taps = 1024, both = false,
  pool = true, squash = 0.002, smooth = 1, decay = true, dropout = 0.0, kernel_dropout = 0.0 }
local kinds = { inputs = "an integer >= 1", vocabulary = "an integer >= 0", outputs = "an integer >= 1",
  width = "an integer >= 1", layers = "an integer >= 1", taps = "an integer >= 1", both = "a boolean",
  pool = "a boolean", squash = "a finite number >= 0", smooth = "an integer >= 1", decay = "a boolean",
  dropout = "a number in [0, 1]", kernel_dropout = "a number in [0, 1]" }

--- options: inputs (1: numbers at a position) or vocabulary (0; above it positions are token ids), outputs (2), width
-- (64), layers (4), taps (1024: how far back a position sees), both (false: what comes later is not seen; true: it is,
-- by as many taps again), pool (true: one answer for a sequence, of the mean over it; false: one at each position),
-- squash (0.002: what is taken off the size of each tap), smooth (1: taps that are averaged, odd), decay (true: taps
-- begin as noise that decays at a rate of its own in each channel; false: as noise), dropout (0), kernel_dropout (0).
---@param options? table
function LongConv:init(options)
  local o = arguments.read("LongConv", options, defaults, kinds)
  if o.smooth % 2 == 0 then arguments.fail("LongConv: smooth: expected an odd number, got %d", o.smooth) end
  self.config = o
  self.encoder = o.vocabulary > 0 and nn.Embedding(o.vocabulary, o.width) or nn.Linear(o.inputs, o.width)
  self.blocks = nn.ModuleList {}
  for _ = 1, o.layers do self.blocks:append(Block(o)) end
  self.norm = nn.LayerNorm(o.width)
  self.head = nn.Linear(o.width, o.outputs)
end

--- Sequences [n, t, inputs], or tokens [n, t], to [n, outputs], without pool to [n, t, outputs].
---@param x Tensor
---@return Tensor
function LongConv:forward(x)
  local o = self.config
  arguments.expect("LongConv", "x", x, "a tensor")
  if o.vocabulary == 0 and (x.ndim ~= 3 or x.shape[3] ~= o.inputs) or o.vocabulary > 0 and x.ndim ~= 2 then
    arguments.fail("LongConv: x: expected %s, got %s", o.vocabulary > 0 and "tokens [n, t]"
      or ("[n, t, %d]"):format(o.inputs), arguments.describe(x))
  end
  x = self.encoder(x)
  for _, block in ipairs(self.blocks) do x = block(x) end
  x = self.norm(x)
  return self.head(o.pool and x:mean(1) or x)
end

--- The share of the taps of all layers that are 0, the skips not counted.
---@return number
function LongConv:zeros()
  local zeros = 0
  ty.no_grad(function()
    for _, block in ipairs(self.blocks) do
      zeros = zeros + block.conv:regular():eq(0):to("f32"):mean():item() / #self.blocks
    end
  end)
  return zeros
end

LongConv.squash, LongConv.smooth = squash, smooth
return LongConv
