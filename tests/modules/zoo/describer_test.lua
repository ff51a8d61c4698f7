-- Captions of canvases by the zoo's painter: pairs, what is right in captions, pictures painted from embeddings.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local zoo = require "tycho.zoo"
local describer = zoo.describer

local painter = zoo.canvas.load()
local batch = describer.pairs(painter, "training", 12, { seed = 4 })

check.test("pairs are canvases, as the painter sees them and in its words", function()
  check.equal({ batch.latents.shape, batch.tokens.shape, #batch.caption }, { { 12, 48, 8, 8 }, { 12, 12 }, 12 })
  check.ok((painter:decode(batch.latents):to "i64" - batch.image:to "i64"):abs():max():item() <= 1)
  local words = {}
  for _, id in ipairs(batch.tokens:select(0, 3):tolist()) do
    if id > 1 then words[#words + 1] = painter.tokenizer:token(id) end
  end
  check.equal(table.concat(words, " "), batch.caption[4])
  local later = describer.pairs(painter, "training", 3, { seed = 4, from = 5 })
  check.equal(later.caption, table.move(batch.caption, 6, 8, 1, {}))
end)

check.test("captions are scored part by part, and word for word", function()
  local truth = { "a hatched violet striped fish on a pink ground", "a neon apple on a blue ground" }
  local same = describer.score(truth, truth)
  check.close({ same.all, same.whole, same.mark }, { 1, 1, 1 }, 1e-12)
  local half = describer.score({ "a hatched violet fish on a pink ground", "a neon red apple on a pink ground" }, truth)
  check.close({ half.style, half.kind, half.colour, half.mark, half.ground, half.whole }, { 1, 1, 0.5, 0.5, 0.5, 0 },
    1e-12)
  check.close(half.all, 0.7, 1e-12)
  check.close(describer.score({ "", "pink ground on" }, truth).all, 0.2, 1e-12) -- colour and mark are rightly not said
  check.fails(function() describer.score({ "a" }, truth) end, "truth: expected as many as the 1 captions, got 2")
end)

check.test("with a text's states, what is painted is what the painter paints of the text", function()
  local captions = table.move(batch.caption, 1, 3, 1, {})
  local got = describer.paint(painter, describer.states(painter, captions), { steps = 3, guidance = 1.5, seed = 7 })
  ty.manual_seed(7)
  local want = painter:paint(captions, { steps = 3, guidance = 1.5, noise = ty.randn(3, 48, 8, 8) })
  check.ok((got:to "i64" - want:to "i64"):abs():max():item() <= 1)
end)

check.test("an encoder and a captioner learn from pairs, and write words of captions", function()
  ty.manual_seed(1)
  local encoder = describer.encoder(painter)
  check.equal(ty.no_grad(encoder:eval(), batch.latents).shape, { 12, 12, 64 })
  local captioner = describer.captioner(encoder, 64)
  local first
  local last = describer.teach(captioner, batch, { steps = 60, batch = 12, lr = 3e-3, encoder = 1,
    watch = function(_, loss) first = first or loss end })
  check.ok(last < 0.3 * first, ("%g after %g"):format(last, first))
  local said = describer.describe(painter, captioner, batch.latents)
  check.ok(describer.score(said, batch.caption).all > 0.6, said[1])
  check.ok(said[1]:find "^a .* on a %a+ ground$" ~= nil, said[1])
end)

check.finish()
