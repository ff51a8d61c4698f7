--- One step of a recurrent layer, with PyTorch's parameter names.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"

local M = {}

local function define(name, gates, defaults, kinds)
  local Cell = base.define(name)

  function Cell:init(inputs, hidden, given)
    local o = options.read(name, given, defaults, kinds)
    self.input_size = options.positive(name, "inputs", inputs)
    self.hidden_size = options.positive(name, "hidden", hidden)
    self.nonlinearity = o.nonlinearity
    local function fill(t) init.uniform(t, -hidden ^ -0.5, hidden ^ -0.5) end
    self.weight_ih = options.parameter({ gates * hidden, inputs }, fill)
    self.weight_hh = options.parameter({ gates * hidden, hidden }, fill)
    if o.bias then
      self.bias_ih = options.parameter({ gates * hidden }, fill)
      self.bias_hh = options.parameter({ gates * hidden }, fill)
    end
  end

  function Cell:describe() return ("%d, %d"):format(self.input_size, self.hidden_size) end

  M[name] = Cell
  return Cell
end

-- x [b, inputs] and states [b, hidden], zeros where they are left out.
local function check(self, who, x, states)
  if not ty.is_tensor(x) or x.ndim ~= 2 or x:size(1) ~= self.input_size then
    options.fail("%s: x: expected a tensor [batch, %d], got %s", who, self.input_size, options.describe(x))
  end
  for name, state in pairs(states) do
    if not ty.is_tensor(state) or state.ndim ~= 2 or state:size(0) ~= x:size(0)
      or state:size(1) ~= self.hidden_size then
      options.fail("%s: %s: expected a tensor [%d, %d], got %s", who, name, x:size(0), self.hidden_size,
        options.describe(state))
    end
  end
end

local function step(self, x, cell, state)
  local gates = ty.linear(x, self.weight_ih, self.bias_ih):unsqueeze(0)
  local _, last = ty.recurrence(gates, self.weight_hh:unsqueeze(0), { bias = self.bias_hh, state = state, cell = cell })
  return last
end

--- One step of nn.RNN: cell(x [b, inputs], h [b, hidden]) gives h. options: bias (true), nonlinearity ("tanh" or
-- "relu").
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local RNNCell = define("RNNCell", 1, { bias = true, nonlinearity = "tanh" }, { nonlinearity = '"tanh" or "relu"' })

function RNNCell:forward(x, h)
  check(self, "RNNCell", x, { h = h })
  h = h or ty.zeros({ x:size(0), self.hidden_size }, { dtype = x.dtype, device = x.device })
  local sum = ty.linear(x, self.weight_ih, self.bias_ih)
  return ty[self.nonlinearity](ty.linear(h, self.weight_hh, self.bias_hh, sum))
end

--- One step of nn.LSTM: cell(x [b, inputs], h, c [b, hidden]) gives h and c. options: bias (true).
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local LSTMCell = define("LSTMCell", 4, { bias = true })

function LSTMCell:forward(x, h, c)
  if (h == nil) ~= (c == nil) then options.fail "LSTMCell: h, c: expected both or none" end
  check(self, "LSTMCell", x, { h = h, c = c })
  local last = step(self, x, "lstm", h and ty.stack { h, c })
  return last:select(0, 0), last:select(0, 1)
end

--- One step of nn.GRU: cell(x [b, inputs], h [b, hidden]) gives h. options: bias (true).
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local GRUCell = define("GRUCell", 3, { bias = true })

function GRUCell:forward(x, h)
  check(self, "GRUCell", x, { h = h })
  return step(self, x, "gru", h and h:unsqueeze(0)):select(0, 0)
end

return M
