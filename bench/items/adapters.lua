--- Adapters by row of a batch: one token of 64 rows through a layer of the 1.1B Llama's shape, each row with a LoRA of
--- its own on all seven matrices, over the same layer alone.
local ty = require "tycho"
local llm, peft, quant = require "tycho.llm", require "tycho.peft", require "tycho.quant"

local ROWS, ROUNDS = 64, 9
local items = {}

local function over_plain(kind, order)
  ty.manual_seed(1)
  local model = llm.Llama { vocab_size = 64, hidden_size = 2048, intermediate_size = 5632, num_hidden_layers = 1,
    num_attention_heads = 32, num_key_value_heads = 4, max_position_embeddings = 64 }:eval()
  if kind == "f16" then model:to(kind) else quant.quantize(model, { dtype = kind }) end
  local set, names = peft.rows(model), {}
  for i = 1, ROWS do
    peft.lora(model, { rank = 8, targets = "all-linear" })
    names[i] = "adapter " .. i
    set:add(names[i])
  end
  local rows = {}
  for i = 1, ROWS do rows[i] = names[order(i)] end
  local tokens = ty.randint(0, 64, { ROWS, 1 })
  local function time(list)
    set:use(list)
    ty.no_grad(model.hidden, model, tokens)
    local began = ty.system.clock()
    for _ = 1, 3 do ty.no_grad(ty.scope, model.hidden, model, tokens) end
    return ty.system.clock() - began
  end
  local ratios = {}
  for i = 1, ROUNDS do
    local plain = time()
    ratios[i] = time(rows) / plain
  end
  set:remove()
  return ty.stats.median(ratios)
end

local orders = { { "in order", function(i) return i end }, { "in disorder", function(i) return i * 29 % ROWS + 1 end },
  { "8 of them", function(i) return i % 8 + 1 end } }
for _, kind in ipairs { "f16", "q4_0" } do
  for _, order in ipairs(orders) do
    items[#items + 1] = { name = ("64 rows, %s/%s"):format(order[1], kind), unit = "x", rounds = 1,
      bars = { most = 1.2 }, sample = function() return over_plain(kind, order[2]) end, peer_sample = function() end }
  end
end

return items
