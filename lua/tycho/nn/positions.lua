--- Sines and cosines of times and places: Sinusoidal, sinusoidal_2d.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local M = {}

--- Embeds numbers t [n] (times of diffusion, sizes, positions) as cosines and sines of t at geometric frequencies:
-- [n, width], float. Nothing is learnt and nothing is saved. Vaswani et al. 2017; Ho et al. 2020.
-- options: period (10000: the longest wave is 2 pi times that), sines_first (false: cosines first, as the published
-- diffusion models have them), shift (0: frequency i is period^(-i / (width / 2 - shift))).
---@overload fun(width: integer, options?: {period?: number, sines_first?: boolean, shift?: number}): Module
local Sinusoidal = base.define "Sinusoidal"
M.Sinusoidal = Sinusoidal

function Sinusoidal:init(width, given)
  local o = options.read("Sinusoidal", given, { period = 10000, sines_first = false, shift = 0 })
  options.positive("Sinusoidal", "width", width)
  if width % 2 ~= 0 then error(("Sinusoidal: width: expected an even number, got %d"):format(width), 3) end
  local half = width // 2
  if o.shift >= half then
    error(("Sinusoidal: shift: expected less than %d, half the width, got %s"):format(half, tostring(o.shift)), 3)
  end
  self.width, self.sines_first = width, o.sines_first
  self.step = -math.log(o.period) / (half - o.shift)
  local frequencies = options.full({ half }, 0, "f32")
  if frequencies.device ~= "meta" then frequencies = self:restore("frequencies", frequencies.device) end
  self:buffer("frequencies", frequencies, { persistent = false })
end

--- The buffer anew on a device, for a module that was made without memory: it is in no file.
function Sinusoidal:restore(name, device)
  return (ty.arange(self.width // 2):to "f32" * self.step):exp():to { device = device }
end

function Sinusoidal:forward(t)
  local angles = t:unsqueeze(1) * self.frequencies:unsqueeze(0)
  if self.sines_first then return ty.concat({ angles:sin(), angles:cos() }, 1) end
  return ty.concat({ angles:cos(), angles:sin() }, 1)
end

function Sinusoidal:describe() return ("%d"):format(self.width) end

--- The fixed table of places on a grid, f32 [rows * columns, width], row by row: sines and cosines of the column, then
-- of the row, as ViT-MAE and DiT have them. width must be a multiple of 4. scale (1): how far neighbours are apart;
-- two numbers: those of the row and of the column.
---@param width integer
---@param rows integer
---@param columns? integer  (rows)
---@param scale? number|number[]
---@return Tensor
function M.sinusoidal_2d(width, rows, columns, scale)
  options.positive("sinusoidal_2d", "width", width)
  options.positive("sinusoidal_2d", "rows", rows)
  columns = options.positive("sinusoidal_2d", "columns", columns or rows)
  if width % 4 ~= 0 then error(("sinusoidal_2d: width: expected a multiple of 4, got %d"):format(width), 2) end
  scale = options.expect("sinusoidal_2d", "scale", scale, "a finite number or a list of finite numbers or nil") or 1
  if type(scale) == "table" and #scale ~= 2 then
    error(("sinusoidal_2d: scale: expected one number or two, got %d"):format(#scale), 2)
  end
  local down, right = scale, scale
  if type(scale) == "table" then down, right = scale[1], scale[2] end
  local quarter = width // 4
  local omega = (ty.arange(quarter):to "f64" * (-math.log(10000) / quarter)):exp()
  local function encode(positions, apart) -- [rows * columns] to [rows * columns, width / 2]
    local angles = (positions * apart):unsqueeze(1) * omega:unsqueeze(0)
    return ty.concat({ angles:sin(), angles:cos() }, 1)
  end
  local x = ty.arange(columns):to("f64"):unsqueeze(0):expand(rows, columns):flatten()
  local y = ty.arange(rows):to("f64"):unsqueeze(1):expand(rows, columns):flatten()
  return ty.concat({ encode(x, right), encode(y, down) }, 1):to "f32"
end

return M
