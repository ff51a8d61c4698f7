--- Adapters that are not two low-rank matrices: what each adds to a linear layer, its parameters under the names that
-- PEFT's files have.
--
--     loha   the elementwise product of two low-rank matrices, of rank r * r (Hyeon-Woo et al. 2022, "FedPara")
--     lokr   a Kronecker product, one factor of which may be low-rank (Edalati et al. 2022, "KronA"; Yeh et al. 2023,
--            "Navigating Text-To-Image Customization": LyCORIS)
--     ia3    a factor for each output, or each input (Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is
--            Better and Cheaper than In-Context Learning")
local ty = require "tycho"

local nn = ty.nn
local surgery = nn.surgery
local parameter = require("tycho.nn.options").parameter
local M = {}

-- y + x ΔW' for a change ΔW [outputs, inputs] that parameters make.
local function forward_by(change)
  return function(self, base, x, residual, activation)
    local y = base.forward(self, x, residual)
    local delta = change(self)
    return surgery.finish(y, ty.linear(x:to(delta.dtype), delta):to(y.dtype), activation)
  end
end

local function merged_by(change)
  return function(self, weight) return weight + change(self, weight.dtype) end
end

local function in_dtype(self, dtype)
  return function(name)
    local p = rawget(self, name)
    return p and dtype and p:to(dtype) or p
  end
end

-- ---- loha ----

local function hadamard(self, dtype)
  local p = in_dtype(self, dtype)
  return p "hada_w1_a":matmul(p "hada_w1_b") * p "hada_w2_a":matmul(p "hada_w2_b") * self._lora.scale
end

local loha = { name = "loha", type = "LOHA", names = { "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b" },
  forward = forward_by(hadamard), merged = merged_by(hadamard) }

local function normal(std)
  return function(t) nn.init.normal(t, 0, std) end
end

function loha.shapes(spec, inputs, outputs)
  return { { "hada_w1_a", { outputs, spec.rank }, normal(0.1) }, { "hada_w1_b", { spec.rank, inputs }, normal(1) },
    { "hada_w2_a", { outputs, spec.rank }, nn.init.zeros }, { "hada_w2_b", { spec.rank, inputs }, normal(0.1) } }
end

-- ---- lokr ----

--- Two divisors of n that are near each other, the smaller first; with a factor that divides n, it and the rest; with
-- another one the smaller is at most that.
---@param n integer
---@param factor integer  -1: none
---@return integer, integer
function M.divisors(n, factor)
  if factor > 0 and n % factor == 0 then return factor, n // factor end
  local most = factor == -1 and n or factor
  local m, rest = 1, n
  while m < rest do
    local next = m + 1
    while n % next ~= 0 do next = next + 1 end
    if next + n // next > m + rest or next > most then break end
    m, rest = next, n // next
  end
  return math.min(m, rest), math.max(m, rest)
end

local function kronecker(a, b)
  return (a:unsqueeze(1):unsqueeze(3) * b:unsqueeze(0):unsqueeze(2))
    :reshape(a.shape[1] * b.shape[1], a.shape[2] * b.shape[2])
end

local function kron_change(self, dtype)
  local p = in_dtype(self, dtype)
  local w1 = p "lokr_w1" or p "lokr_w1_a":matmul(p "lokr_w1_b")
  local w2 = p "lokr_w2" or p "lokr_w2_a":matmul(p "lokr_w2_b")
  return kronecker(w1, w2) * self._lora.scale
end

local lokr = { name = "lokr", type = "LOKR",
  names = { "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b" },
  forward = forward_by(kron_change), merged = merged_by(kron_change) }

local function uniform(t) nn.init.kaiming_uniform(t, { a = math.sqrt(5) }) end

-- A factor of a Kronecker product, in two low-rank parts or whole.
local function factor_of(name, rows, columns, rank, parted, first)
  if not parted then return { { name, { rows, columns }, first } } end
  return { { name .. "_a", { rows, rank }, first }, { name .. "_b", { rank, columns }, uniform } }
end

function lokr.shapes(spec, inputs, outputs)
  local rows, more_rows = M.divisors(outputs, spec.factor)
  local columns, more_columns = M.divisors(inputs, spec.factor)
  local list = factor_of("lokr_w1", rows, columns, spec.rank, spec.both and spec.rank < math.max(rows, columns) / 2,
    nn.init.zeros)
  local second = factor_of("lokr_w2", more_rows, more_columns, spec.rank,
    spec.rank < math.max(more_rows, more_columns) / 2, uniform)
  return table.move(second, 1, #second, #list + 1, list)
end

-- ---- ia3 ----

local ia3 = { name = "ia3", type = "IA3", names = { "ia3_l" } }

function ia3.shapes(spec, inputs, outputs)
  return { { "ia3_l", spec.of_inputs and { 1, inputs } or { outputs, 1 }, nn.init.ones } }
end

function ia3.forward(self, base, x, residual, activation)
  local factor = self.ia3_l:flatten()
  if self._lora.of_inputs then
    return base.forward(self, (x:to(factor.dtype) * factor):to(x.dtype), residual, activation)
  end
  local y = base.forward(self, x)
  return surgery.finish((y:to(factor.dtype) * factor):to(y.dtype), residual, activation)
end

function ia3.merged(self, weight) return weight * self.ia3_l:to(weight.dtype) end

--- A factor of outputs counts for the bias as well, which a merged weight cannot have.
function ia3.refuse(self)
  if not self._lora.of_inputs and self.bias then return "its factors are the bias's as well" end
end

M.loha, M.lokr, M.ia3 = loha, lokr, ia3

--- Gives a linear layer the parameters of a way. spec: rank; of lokr factor and both, of ia3 of_inputs.
function M.attach(module, spec, inputs, outputs)
  module._lora.of_inputs = spec.of_inputs
  for _, entry in ipairs(spec.way.shapes(spec, inputs, outputs)) do
    module[entry[1]] = parameter(entry[2], entry[3])
  end
end

--- What is wrong with a layer's tensors of a file, by name, or nil.
---@return string?
function M.check(part, spec, inputs, outputs)
  local known = {}
  for _, entry in ipairs(spec.way.shapes(spec, inputs, outputs)) do
    local name, t = entry[1], part[entry[1]]
    known[name] = true
    if not t then return name .. " is not there" end
    if t.ndim ~= 2 or t.shape[1] ~= entry[2][1] or t.shape[2] ~= entry[2][2] or not t:is_floating_point() then
      return ("%s: expected floats [%d, %d], got %s [%s]"):format(name, entry[2][1], entry[2][2], t.dtype,
        table.concat(t.shape, ", "))
    end
  end
  for name in pairs(part) do
    if not known[name] then return name .. " is there as well" end
  end
end

--- All parameters that ways give layers.
M.fields = {}
for _, way in ipairs { loha, lokr, ia3 } do table.move(way.names, 1, #way.names, #M.fields + 1, M.fields) end

return M
