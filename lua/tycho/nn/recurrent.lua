--- Recurrent layers: LSTM, GRU (with PyTorch's parameter names) and SLSTM. All steps of a layer are one native op,
-- ty.recurrence, forward and backward.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"

local M = {}

local defaults = { num_layers = 1, bias = true, batch_first = true, dropout = 0, bidirectional = false }
local kinds = { num_layers = "an integer >= 1", dropout = "a number in [0, 1)", heads = "an integer >= 1",
  forget = '"sigmoid" or "exp"' }

-- What all of them have. `shape` gives sizes by the width of the inputs: of weight_ih, weight_hh and the biases.
local function build(self, who, inputs, hidden, o)
  options.positive(who, "inputs", inputs)
  options.positive(who, "hidden", hidden)
  self.input_size, self.hidden_size, self.num_layers, self.bias = inputs, hidden, o.num_layers, o.bias
  self.batch_first, self.dropout, self.bidirectional = o.batch_first, o.dropout, o.bidirectional
end

-- fn(suffix of the parameters' names, width of the layer's inputs, whether it runs from the end).
local function each_layer(self, fn)
  local directions = self.bidirectional and 2 or 1
  for layer = 0, self.num_layers - 1 do
    for direction = 1, directions do
      local width = layer == 0 and self.input_size or self.hidden_size * directions
      fn("_l" .. layer .. (direction == 2 and "_reverse" or ""), width, direction == 2)
    end
  end
end

-- x through all layers. part(suffix) gives weight_ih, weight_hh [heads, gates * d, d] and the two biases; state(k),
-- from 1, what layer and direction k begin with, or nil. Returns y and the list of the last states.
local function run(self, who, x, cell, part, state)
  if not ty.is_tensor(x) or x.ndim ~= 3 or x:size(2) ~= self.input_size then
    options.fail("%s: x: expected a tensor %s, got %s", who, (self.batch_first and "[batch, time, %d]"
      or "[time, batch, %d]"):format(self.input_size), options.describe(x))
  end
  if self.batch_first then x = x:transpose(0, 1) end
  local last, outs = {}, {}
  each_layer(self, function(suffix, _, reverse)
    local weight_ih, weight_hh, bias_ih, bias_hh = part(suffix)
    local gates = ty.linear(reverse and ty.flip(x, 0) or x, weight_ih, bias_ih)
    local y, final = ty.recurrence(gates, weight_hh, { bias = bias_hh, state = state(#last + 1), cell = cell })
    last[#last + 1] = final
    outs[#outs + 1] = reverse and ty.flip(y, 0) or y
    if self.bidirectional and not reverse then return end
    x = #outs == 1 and outs[1] or ty.concat(outs, -1)
    outs = {}
    local on_top = #last == self.num_layers * (self.bidirectional and 2 or 1)
    if self.dropout > 0 and self.training and not on_top then x = ty.dropout(x, self.dropout, true) end
  end)
  return self.batch_first and x:transpose(0, 1) or x, last
end

local function describe(self)
  local text = ("%d, %d"):format(self.input_size, self.hidden_size)
  for _, name in ipairs { "num_layers", "heads", "forget", "bias", "batch_first", "dropout", "bidirectional" } do
    local value, default = self[name], defaults[name]
    if name == "heads" then default = 1 elseif name == "forget" then default = "sigmoid" end
    if value ~= nil and value ~= default then text = text .. (", %s = %s"):format(name, tostring(value)) end
  end
  return text
end

-- PyTorch's: all uniform within +-1 / sqrt(hidden).
local function torch_parameters(self, gates)
  local hidden = self.hidden_size
  local function fill(t) init.uniform(t, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden)) end
  each_layer(self, function(suffix, width)
    self["weight_ih" .. suffix] = options.parameter({ gates * hidden, width }, fill)
    self["weight_hh" .. suffix] = options.parameter({ gates * hidden, hidden }, fill)
    if self.bias then
      self["bias_ih" .. suffix] = options.parameter({ gates * hidden }, fill)
      self["bias_hh" .. suffix] = options.parameter({ gates * hidden }, fill)
    end
  end)
end

local function torch_part(self)
  return function(suffix)
    return self["weight_ih" .. suffix], self["weight_hh" .. suffix]:unsqueeze(0), self["bias_ih" .. suffix],
      self["bias_hh" .. suffix]
  end
end

-- The k-th of the states [layers, b, hidden] that were given.
local function nth(who, name, t, k)
  if not ty.is_tensor(t) or t.ndim ~= 3 or k > t:size(0) then
    options.fail("%s: %s: expected a tensor [layers * directions, batch, hidden], got %s", who, name,
      options.describe(t))
  end
  return t:select(0, k - 1)
end

local function column(last, i)
  local list = {}
  for k, state in ipairs(last) do list[k] = state:select(0, i) end
  return ty.stack(list, 0)
end

--- Long short-term memory (Hochreiter and Schmidhuber 1997), as PyTorch's: gates input, forget, cell, output.
-- Inputs are [batch, time, inputs]: batch_first = true is the default here, as in MultiheadAttention.
-- options: num_layers (1), bias (true), batch_first (true), dropout (0, between layers, in training), bidirectional
-- (false). layer(x, h, c) gives y [batch, time, directions * hidden], h and c [num_layers * directions, batch, hidden].
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local LSTM = base.define "LSTM"
M.LSTM = LSTM

function LSTM:init(inputs, hidden, given)
  build(self, "LSTM", inputs, hidden, options.read("LSTM", given, defaults, kinds))
  torch_parameters(self, 4)
end

--- h and c: what to go on from, as an earlier call gave them; left out: zeros.
function LSTM:forward(x, h, c)
  if (h == nil) ~= (c == nil) then options.fail "LSTM: h, c: expected both or none" end
  local y, last = run(self, "LSTM", x, "lstm", torch_part(self), function(k)
    return h and ty.stack { nth("LSTM", "h", h, k), nth("LSTM", "c", c, k) }
  end)
  return y, column(last, 0), column(last, 1)
end

LSTM.describe = describe

--- Gated recurrent units (Cho et al. 2014), as PyTorch's: gates reset, update, new, the reset gate after the recurrent
-- product. Options as LSTM's. layer(x, h) gives y and h.
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local GRU = base.define "GRU"
M.GRU = GRU

function GRU:init(inputs, hidden, given)
  build(self, "GRU", inputs, hidden, options.read("GRU", given, defaults, kinds))
  torch_parameters(self, 3)
end

function GRU:forward(x, h)
  local y, last = run(self, "GRU", x, "gru", torch_part(self), function(k)
    return h and nth("GRU", "h", h, k):unsqueeze(0)
  end)
  return y, column(last, 0)
end

GRU.describe = describe

--- LSTM with an exponential input gate, a normaliser and a stabiliser (Beck et al. 2024, xLSTM), its units in heads
-- that see only themselves in the recurrence. Gates input, forget, cell, output of each head, head after head.
-- options: LSTM's, heads (1), forget ("sigmoid" or "exp"). The biases of the forget gates begin spread over each head,
-- -3 to 5 (exp: to 0, where nothing is forgotten), so that some units keep what they have for long and others not.
-- layer(x, state) gives y and the state [num_layers * directions, 4, batch, hidden]: h, c, n, m.
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local SLSTM = base.define "SLSTM"
M.SLSTM = SLSTM

function SLSTM:init(inputs, hidden, given)
  local all = { heads = 1, forget = "sigmoid" }
  for name, value in pairs(defaults) do all[name] = value end
  local o = options.read("SLSTM", given, all, kinds)
  build(self, "SLSTM", inputs, hidden, o)
  if hidden % o.heads ~= 0 then
    options.fail("SLSTM: heads: expected a divisor of hidden %d, got %d", hidden, o.heads)
  end
  self.heads, self.forget = o.heads, o.forget
  local heads, d = o.heads, hidden // o.heads
  local function within(n)
    return function(t) init.uniform(t, -1 / math.sqrt(n), 1 / math.sqrt(n)) end
  end
  each_layer(self, function(suffix, width)
    self["weight_ih" .. suffix] = options.parameter({ 4 * hidden, width }, within(width))
    self["weight_hh" .. suffix] = options.parameter({ heads, 4 * d, d }, within(d))
    if not o.bias then return end
    self["bias" .. suffix] = options.parameter({ 4 * hidden }, function(t)
      init.zeros(t)
      ty.no_grad(function()
        t:reshape(heads, 4, d):select(1, 1):copy_(ty.linspace(-3, o.forget == "exp" and 0 or 5, d))
      end)
    end)
  end)
end

function SLSTM:forward(x, state)
  local y, last = run(self, "SLSTM", x, self.forget == "exp" and "slstm_exp" or "slstm", function(suffix)
    return self["weight_ih" .. suffix], self["weight_hh" .. suffix], self["bias" .. suffix]
  end, function(k) return state and ty.select(state, 0, k - 1) end)
  return y, ty.stack(last, 0)
end

SLSTM.describe = describe

return M
