--- Generators over tokens: the loop that draws them, its parts, and tokenizers of pictures.
--
--     local tokens = diffusion.tokens
--     local way = tokens.next_scale(model, tokenizer)
--     local ids = tokens.sample(way, { labels = labels }, { guidance = 2, draw = tokens.categorical { top_k = 50 } })
--     local pictures = tokenizer:decode(ids)
--
-- A way says in which steps tokens come: the next scale, some masked places, the next vector of bits, all bits a little
-- less noisy. It has `steps`, and for a number of samples
--     begin(n)                          what there is before the first step, a table
--     predict(state, step, condition)   what a network says of the tokens of a step; `condition` has the samples once,
--                                       or (with guidance) once more for the null condition behind them
--     take(state, step, drawn)          adds what was drawn
--     finish(state)                     the result
-- Guidance is a number, or a function of how far it has got (0 to 1). draw(said, other, scale, step) makes tokens of
-- what is said under the condition and (nil without guidance) under the null condition.
local draws = require "tycho.diffusion.tokens.draw"
local tokenizer = require "tycho.diffusion.tokens.tokenizer"

return {
  sample = require "tycho.diffusion.tokens.sample",
  guided = draws.guided,
  rising = draws.rising,
  categorical = draws.categorical,
  bernoulli = draws.bernoulli,
  next_scale = require "tycho.diffusion.tokens.next_scale",
  masked = require "tycho.diffusion.tokens.masked",
  next_token = require "tycho.diffusion.tokens.next_token",
  fit = tokenizer.fit,
  reconstruction = tokenizer.reconstruction,
}
