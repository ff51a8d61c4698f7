--- Recurrent layers: RNN, LSTM, GRU (with PyTorch's parameter names) and SLSTM. All steps of a layer of the last three
-- are one native op, ty.recurrence, forward and backward.
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

-- Sequences of different lengths [b] in a batch of t steps: which steps are there, bool [t, b, 1], and the order of
-- steps that turns each sequence round where it stands, i64 [t, b, 1]. nil for none.
local function read_lengths(who, given, x)
  local lengths = options.read(who, given, { lengths = options.none },
    { lengths = "a tensor or a list of integers >= 0" }).lengths
  if lengths == nil then return nil end
  local t, b = x:size(0), x:size(1)
  if not ty.is_tensor(lengths) then lengths = ty.tensor(lengths, { dtype = "i64" }) end
  if lengths.ndim ~= 1 or lengths:size(0) ~= b or lengths:is_floating_point() then
    options.fail("%s: lengths: expected %d integers, one for each sequence, got %s", who, b,
      options.describe(lengths))
  end
  lengths = lengths:to { dtype = "i64", device = x.device }
  local known = b > 0 and x.device ~= "meta" and not ty.core.program.is_compiling()
  if known and (lengths:max():item() > t or lengths:min():item() < 0) then
    options.fail("%s: lengths: expected numbers in [0, %d], the steps of x, got %d to %d", who, t,
      lengths:min():item(), lengths:max():item())
  end
  local step = ty.arange(t, { device = x.device }):unsqueeze(1)
  local there = step:lt(lengths)
  return { there = there:unsqueeze(2), round = ty.where(there, lengths - 1 - step, step):unsqueeze(2) }
end

local function turned(x, lengths)
  if not lengths then return ty.flip(x, 0) end
  return x:gather(0, lengths.round:expand(x.shape))
end

-- Gates with which a step leaves the state as it is: far beyond where sigmoid is 0 or 1.
local holding = { lstm = { -1e4, 1e4, 0, 0 }, gru = { 0, 1e4, 0 } }

local function hold(gates, cell, lengths)
  local numbers, d, parts = holding[cell], gates:size(2) // #holding[cell], {}
  for i, value in ipairs(numbers) do
    parts[i] = ty.full({ d }, value, { dtype = gates.dtype, device = gates.device })
  end
  return ty.where(lengths.there, gates, ty.concat(parts))
end

-- The native op for all steps of a layer and direction: gates [t, b, n], weight_hh, bias_hh, the state before.
local function native(cell)
  return function(gates, weight_hh, bias_hh, state, lengths)
    if not lengths then return ty.recurrence(gates, weight_hh, { bias = bias_hh, state = state, cell = cell }) end
    local y, last = ty.recurrence(hold(gates, cell, lengths), weight_hh, { bias = bias_hh, state = state,
      cell = cell })
    if cell == "lstm" then -- c is held; h, of another output gate than at the end, is not
      local at = lengths.there:to("i64"):sum { 0 }:unsqueeze(0) - 1
      local h = y:gather(0, at:clamp(0):expand(1, y:size(1), y:size(2)))
      local before = state and state:select(0, 0):unsqueeze(0) or 0.0
      last = ty.concat({ ty.where(at:ge(0), h, before), last:narrow(0, 1, 1) }, 0)
    end
    return ty.where(lengths.there, y, 0.0), last
  end
end

-- x through all layers. part(suffix) gives weight_ih, weight_hh [heads, gates * d, d] and the two biases; state(k),
-- from 1, what layer and direction k begin with, or nil. steps: as native() gives it. Returns y and the list of the
-- last states.
local function run(self, who, x, steps, part, state, given)
  if not ty.is_tensor(x) or x.ndim ~= 3 or x:size(2) ~= self.input_size then
    options.fail("%s: x: expected a tensor %s, got %s", who, (self.batch_first and "[batch, time, %d]"
      or "[time, batch, %d]"):format(self.input_size), options.describe(x))
  end
  if self.batch_first then x = x:transpose(0, 1) end
  local last, outs, lengths = {}, {}, read_lengths(who, given, x)
  each_layer(self, function(suffix, _, reverse)
    local weight_ih, weight_hh, bias_ih, bias_hh = part(suffix)
    local gates = ty.linear(reverse and turned(x, lengths) or x, weight_ih, bias_ih)
    local y, final = steps(gates, weight_hh, bias_hh, state(#last + 1), lengths)
    last[#last + 1] = final
    outs[#outs + 1] = reverse and turned(y, lengths) or y
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
-- layer(x, h, c, { lengths = ... }) or layer(x, { lengths = ... }): sequences of the batch that end earlier, a tensor
-- or a list; y is 0 behind their ends, h and c are those at the ends, the reverse direction begins there.
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local LSTM = base.define "LSTM"
M.LSTM = LSTM

function LSTM:init(inputs, hidden, given)
  build(self, "LSTM", inputs, hidden, options.read("LSTM", given, defaults, kinds))
  torch_parameters(self, 4)
end

--- h and c: what to go on from, as an earlier call gave them; left out: zeros.
function LSTM:forward(x, h, c, given)
  if type(h) == "table" then h, given = nil, h end
  if (h == nil) ~= (c == nil) then options.fail "LSTM: h, c: expected both or none" end
  local y, last = run(self, "LSTM", x, native "lstm", torch_part(self), function(k)
    return h and ty.stack { nth("LSTM", "h", h, k), nth("LSTM", "c", c, k) }
  end, given)
  return y, column(last, 0), column(last, 1)
end

LSTM.describe = describe

--- Gated recurrent units (Cho et al. 2014), as PyTorch's: gates reset, update, new, the reset gate after the recurrent
-- product. Options as LSTM's. layer(x, h) gives y and h; lengths as LSTM's.
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local GRU = base.define "GRU"
M.GRU = GRU

function GRU:init(inputs, hidden, given)
  build(self, "GRU", inputs, hidden, options.read("GRU", given, defaults, kinds))
  torch_parameters(self, 3)
end

function GRU:forward(x, h, given)
  if type(h) == "table" then h, given = nil, h end
  local y, last = run(self, "GRU", x, native "gru", torch_part(self), function(k)
    return h and nth("GRU", "h", h, k):unsqueeze(0)
  end, given)
  return y, column(last, 0)
end

GRU.describe = describe

local rnn_defaults, rnn_kinds = { nonlinearity = "tanh" }, { nonlinearity = '"tanh" or "relu"' }
for name, value in pairs(defaults) do rnn_defaults[name] = value end
for name, kind in pairs(kinds) do rnn_kinds[name] = kind end

-- The steps of a plain layer, one by one: there is no native op for them.
local function plain(nonlinearity)
  local f = ty[nonlinearity]
  return function(gates, weight_hh, bias_hh, state, lengths)
    local weight, ys = weight_hh:squeeze(0), {}
    local h = state and state:squeeze(0)
      or ty.zeros({ gates:size(1), weight:size(0) }, { dtype = gates.dtype, device = gates.device })
    for t = 1, gates:size(0) do
      local new = f(ty.linear(h, weight, bias_hh, gates:select(0, t - 1)))
      if lengths then
        local there = lengths.there:select(0, t - 1)
        h, ys[t] = ty.where(there, new, h), ty.where(there, new, 0.0)
      else
        h, ys[t] = new, new
      end
    end
    local y = #ys > 0 and ty.stack(ys, 0) or gates:narrow(-1, 0, weight:size(0))
    return y, h:unsqueeze(0)
  end
end

--- The plain recurrent network of Elman 1990: h = tanh(W x + U h + b). Options as LSTM's, and nonlinearity ("tanh" or
-- "relu"). layer(x, h) gives y and h; lengths as LSTM's.
---@overload fun(inputs: integer, hidden: integer, options?: table): Module
local RNN = base.define "RNN"
M.RNN = RNN

function RNN:init(inputs, hidden, given)
  local o = options.read("RNN", given, rnn_defaults, rnn_kinds)
  build(self, "RNN", inputs, hidden, o)
  self.nonlinearity = o.nonlinearity
  torch_parameters(self, 1)
end

function RNN:forward(x, h, given)
  if type(h) == "table" then h, given = nil, h end
  local y, last = run(self, "RNN", x, plain(self.nonlinearity), torch_part(self), function(k)
    return h and nth("RNN", "h", h, k):unsqueeze(0)
  end, given)
  return y, column(last, 0)
end

RNN.describe = describe

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
  local y, last = run(self, "SLSTM", x, native(self.forget == "exp" and "slstm_exp" or "slstm"), function(suffix)
    return self["weight_ih" .. suffix], self["weight_hh" .. suffix], self["bias" .. suffix]
  end, function(k) return state and ty.select(state, 0, k - 1) end)
  return y, ty.stack(last, 0)
end

SLSTM.describe = describe

return M
