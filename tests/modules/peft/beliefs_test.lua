-- Invented facts: learnt by heart, edited, measured; what fine-tuning changes is taken back.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local verses = ("And the king went up to Jerusalem, and he dwelt there with the people of the land. "):rep(30)
local words = (" Jerusalem Egypt Babylon Hebron Samaria Zion Gilead Jericho Bethel Moab David Moses Aaron Saul Jacob"
  .. " Joseph Solomon Samuel Joshua Abraham"):rep(30)
local tokenizer = ty.tokenizer.train({ verses, words }, { vocabulary = 480 })

local function beliefs()
  ty.manual_seed(0)
  math.randomseed(1)
  local model = llm.Llama { vocab_size = tokenizer.size, hidden_size = 32, intermediate_size = 64,
    num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 128 }
  return peft.beliefs.new(model, tokenizer, { people = 8, texts = { verses }, unrelated = { verses }, probes = 6,
    length = 16, unrelated_length = 16 })
end

check.test("facts, edits and what stands beside them", function()
  local b = beliefs()
  check.equal({ #b.facts, #b.trained, #b.held_out }, { 16, 12, 4 })
  local edits = b:edits(b.held_out, 6)
  check.equal(#edits, 6)
  for _, edit in ipairs(edits) do check.ok(edit.object ~= edit.fact.answer) end
  local prompts, objects = b:said(edits[1], { 4, 5 })
  check.equal({ prompts[1], objects[2] }, { edits[1].fact.prompts[4], edits[1].object })
  -- Prompts of different lengths together give what each gives alone.
  ty.no_grad(function()
    local both, alone = b:behind(prompts), b:behind { prompts[2] }
    check.ok((both:narrow(0, 1, 1) - alone):abs():max():item() < 1e-4)
    local bystanders = b:bystanders(b.facts[1])
    check.equal(bystanders().shape, { 32, tokenizer.size })
    check.equal((bystanders() - bystanders()):abs():max():item(), 0.0)
  end)
  local letters = ty.tokenizer.train({ verses }, { vocabulary = 257 })
  check.fails(function() peft.beliefs.new(b.model, letters, { texts = { verses }, unrelated = { verses } }) end,
    "peft.beliefs.new: tokenizer: expected words with a space before them to begin differently")
  check.fails(function() b:measure(edits, print, print) end, "has learnt its facts by Beliefs:learn")
end)

check.test("learning, an edit by fine-tuning, and back", function()
  local b = beliefs()
  b:learn(ty.optim.AdamW(b.model, { lr = 3e-3 }), 60, { batch = 16 })
  check.ok(ty.stats.mean(b.known) > 0.1, ty.stats.mean(b.known))
  local before, edits = b:text_nats(), b:edits(b.held_out, 4)
  local change, restore = b:fine_tuning({ "layers.0.mlp.down_proj", "layers.0.mlp.up_proj" }, { steps = 60 })
  local found = b:measure(edits, change(3e-3), restore)
  local untouched = b:measure(edits, function() end, function() end)
  check.ok(found.own >= 0.75 and found.own > untouched.own,
    ("%g of the edits hold, %g without"):format(found.own, untouched.own))
  check.equal(b:text_nats(), before, "all is as it was")
  check.equal({ untouched.drawdown, untouched.lost }, { 0.0, 0.0 })
  local gentle, undo = b:fine_tuning({ "layers.0.mlp.down_proj" }, { kl = true, steps = 2 })
  b:measure(edits, gentle(1e-3), undo)
  check.equal(b:text_nats(), before)
end)

check.finish()
