--- The shapes of the 124M parameters of GPT-2: 50257 x 768 and 1024 x 768 embeddings, twelve layers, the last norm.
local shapes = { { 50257, 768 }, { 1024, 768 } }
for _ = 1, 12 do
  for _, shape in ipairs { { 768 }, { 768 }, { 768, 2304 }, { 2304 }, { 768, 768 }, { 768 }, { 768 }, { 768 },
    { 768, 3072 }, { 3072 }, { 3072, 768 }, { 768 } } do
    shapes[#shapes + 1] = shape
  end
end
shapes[#shapes + 1], shapes[#shapes + 2] = { 768 }, { 768 }
return shapes
