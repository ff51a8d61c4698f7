--- Language models: require "tycho.llm".
--
--     local llm = require "tycho.llm"
--     local model = llm.GPT2 {}:load "gpt2.safetensors"
--     local tokens = model:generate(ty.tensor { { 464, 3290 } }, 20, { top_k = 40 })
return {
  GPT2 = require "tycho.llm.gpt2",
}
