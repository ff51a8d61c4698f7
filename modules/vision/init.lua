--- Image classification: require "tycho.vision".
local classify = require "tycho.vision.classify"
local precision = require "tycho.vision.precision"

return {
  ResNet = require "tycho.models.resnet",
  fit = classify.fit,
  classifier_loss = classify.classifier_loss,
  predict = classify.predict,
  scores = classify.scores,
  accuracy = classify.accuracy,
  random_shift = classify.random_shift,
  mean_average_precision = precision.mean_average_precision,
  macro_f1 = precision.macro_f1,
  interval = precision.interval,
}
